"""How long starts take by tier and mode, as the platform's planners predict (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks.trace_sim.modes import ImageSource, SimulatedMode
from invoker.emulated.profiles import Profile
from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.automatic import LinkFacts, choose_planner, default_link_facts
from rdmacast.plan.planners.catalog import PLANNERS

_MAX_TRANSFERS = 1 << 12  # of a plan that is made, as in gateway/planning/cast_forecast.py
_MIN_BLOCKS, _USUAL_BLOCKS = 16, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """The platform's own time, in model seconds.

    `start_s` is added to each start, `react_s` passes between a change of the load and the decision on it.
    `call_s` is added to each time to first token. Calls leave an instance that is to stop every `move_s`.
    """

    start_s: float = 0.05
    react_s: float = 0.05
    call_s: float = 0.005
    move_s: float = 0.05


class StartTimes:
    """The start times of one model in one mode."""

    def __init__(self, profile: Profile, mode: SimulatedMode, overheads: Overheads) -> None:
        links = profile.links
        self._mode = mode
        self._nbytes = profile.image_bytes * profile.scale
        self._network_bytes_s = links.network
        self._overhead_s = overheads.start_s
        self._next_s: dict[int, float] = {}
        free = mode.source is ImageSource.FREE
        self.hot_s = self._overhead_s
        self.warm_s = self._overhead_s + (0.0 if free else self._nbytes / links.host)
        self._disk_s = self._overhead_s + (0.0 if free else self._nbytes / links.disk)

    def cold_s(self, sources: int, targets: int) -> Sequence[float]:
        """Return when each of the targets of one decision is ready, soonest first.

        With no source the first node reads its disk, and gives the image to the others.
        """
        if self._mode.source is ImageSource.FREE:
            return [self._overhead_s] * targets
        if self._mode.source is ImageSource.HOST:
            return [self.warm_s] * targets
        if self._mode.source is ImageSource.DISK:
            return [self._disk_s] * targets
        read_s: list[float] = []
        if not sources:
            sources, targets, read_s = 1, targets - 1, [self._disk_s]
        if not targets:
            return read_s
        planner, blocks = self._plan(sources, targets)
        copy_s = self._nbytes / self._network_bytes_s
        begin_s = self._overhead_s + self._mode.setup_s + (read_s[0] if read_s else 0.0)
        return read_s + [begin_s + copies * copy_s for copies in _copies(planner, sources, targets, blocks)]

    def cast_images(self, sources: int, targets: int) -> int:
        """Return how many of the targets get the image from others."""
        return max(0, targets - (not sources)) if self._mode.source is ImageSource.CAST else 0

    def next_cold_s(self, sources: int) -> float:
        """Return when a further cold start would be ready."""
        if sources not in self._next_s:
            self._next_s[sources] = self.cold_s(sources, 1)[0]
        return self._next_s[sources]

    def _plan(self, sources: int, targets: int) -> tuple[str, int]:
        """Return planner and number of blocks."""
        if self._mode.planner:
            return self._mode.planner, _USUAL_BLOCKS
        usual = default_link_facts("rdma")
        return _choice(sources, targets, self._nbytes, self._network_bytes_s, usual.overhead_s)


@lru_cache(maxsize=4096)
def _choice(sources: int, targets: int, nbytes: int, bytes_s: float, overhead_s: float) -> tuple[str, int]:
    facts = LinkFacts(bytes_per_s=bytes_s, latency_s=overhead_s, overhead_s=overhead_s)
    chosen = choose_planner(nodes=sources + targets, sources=sources, nbytes=nbytes, facts=facts)
    return chosen.planner, chosen.blocks


@lru_cache(maxsize=4096)
def _copies(planner: str, sources: int, targets: int, blocks: int) -> tuple[float, ...]:
    """Return when each target is complete, soonest first, in copies over one link."""
    nodes = sources + targets
    blocks = max(1, min(blocks, max(_MIN_BLOCKS, _MAX_TRANSFERS // nodes)))
    plan = PLANNERS[planner].plan(CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=blocks))
    complete = plan.arrivals()[sources:].max(axis=1) / blocks
    return tuple(np.sort(complete).tolist())
