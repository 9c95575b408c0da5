"""What a simulation counts, and the record of it."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from benchmarks.trace_sim.cluster import StartTier
from benchmarks.trace_sim.instance import SimulatedCall, SimulatedInstance
from registry.records.function import Scaling

MAX_POINTS = 2000  # of the instances over time


@dataclass(slots=True, kw_only=True)
class RunFigures:
    """The figures of one run; `call_s` is added to each time to first token.

    GPU time counts until `until_s`; of it instances loaded for `loading_s` and ran steps for `busy_s`.
    """

    scaling: Scaling
    call_s: float
    requests: int = 0
    open_calls: int = 0
    until_s: float = inf
    gpu_s: float = 0.0
    loading_s: float = 0.0
    busy_s: float = 0.0
    queued_s: float = 0.0  # of all calls, before they were sent to an instance
    within: int = 0
    cast_images: int = 0  # that nodes took from others
    decisions: int = 0
    deciding_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)  # means of requests with several tokens
    starts: Counter[str] = field(default_factory=Counter)
    instances: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])

    def arrived(self) -> None:
        self.requests += 1
        self.open_calls += 1

    def ended(self, call: SimulatedCall) -> None:
        """Count a call, which ends once."""
        self.open_calls -= 1
        ttft_s = call.first_s - call.arrived_s + self.call_s
        tbt_s = 0.0
        if call.output_tokens > 1:
            tbt_s = (call.end_s - call.first_s) / (call.output_tokens - 1)
            self.tbt_s.append(tbt_s)
        self.ttft_s.append(ttft_s)
        self.queued_s += call.assigned_s - call.arrived_s
        self.within += ttft_s <= self.scaling.ttft_target_s and tbt_s <= self.scaling.tbt_target_s

    def decided(self, seconds: float) -> None:
        self.decisions += 1
        self.deciding_s += seconds

    def started(self, tier: StartTier, now_s: float, *, counts: bool) -> None:
        """Count an instance; the first ones of a run are no starts."""
        if counts:
            self.starts[tier.name.lower()] += 1
        self._step(now_s, 1)

    def stopped(self, instance: SimulatedInstance, now_s: float) -> None:
        end_s = min(now_s, self.until_s)
        lasted_s = max(0.0, end_s - instance.started_s)
        loading_s = min(lasted_s, instance.ready_s - instance.started_s)
        self.gpu_s += lasted_s
        self.loading_s += loading_s
        self.busy_s += min(lasted_s - loading_s, instance.busy_s)
        self._step(now_s, -1)

    def _step(self, now_s: float, change: int) -> None:
        now_s = min(now_s, self.until_s)
        at_s, count = self.instances[-1]
        if at_s == now_s:
            self.instances[-1] = now_s, count + change
        else:
            self.instances.append((now_s, count + change))

    @property
    def integral_s(self) -> float:
        """The integral of the instances over time, which is `gpu_s`."""
        return sum(count * (until - at) for (at, count), (until, _) in pairwise(self.instances))

    def timeline(self) -> list[list[float]]:
        """Return the instances over time: all changes, or the numbers at so many moments."""
        points = self.instances
        if len(points) > MAX_POINTS:
            last_s, at, sampled = points[-1][0], 0, []
            for number in range(MAX_POINTS):
                moment_s = last_s * number / (MAX_POINTS - 1)
                while at + 1 < len(points) and points[at + 1][0] <= moment_s:
                    at += 1
                sampled.append((moment_s, points[at][1]))
            points = sampled
        return [[round(at_s, 3), count] for at_s, count in points]
