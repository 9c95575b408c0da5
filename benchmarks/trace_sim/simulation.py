"""One simulated run from its settings to its figures (pure)."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.harness.traces import TraceRequest
from benchmarks.scaleout.profiles import kv_tokens
from benchmarks.trace_sim.cluster import SimulatedCluster
from benchmarks.trace_sim.figures import RunFigures
from benchmarks.trace_sim.function import SimulatedFunction
from benchmarks.trace_sim.instance import EngineModel
from benchmarks.trace_sim.modes import SimulatedMode
from benchmarks.trace_sim.observed import ObservedCapacity
from benchmarks.trace_sim.platform import SimulatedPlatform
from benchmarks.trace_sim.starts import Overheads, StartTimes
from gateway.planning.load_target import LoadTarget
from gateway.planning.policy import ConcurrencyTarget, ScalerPolicy
from invoker.emulated.profiles import Profile
from invoker.engine.factory import MIN_SEQUENCES
from invoker.engine.kv.budget import TYPICAL_TOKENS
from registry.records.function import Scaling, ScalingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What is simulated.

    `host_images` fit into a host's memory, for `host_ttl_s` after their last use. With `keeps_gpu` an
    accelerator keeps the image of its last instance. `kv_tokens` fit into an instance's KV cache (None: what
    the accelerator has room for, or half of that where there are several functions).
    """

    profile: Profile
    mode: SimulatedMode
    scaling: Scaling
    nodes: int
    overheads: Overheads
    host_images: int
    host_ttl_s: float
    keeps_gpu: bool = False
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The figures of a run, with the cluster and the platform at its end."""

    figures: RunFigures
    cluster: SimulatedCluster
    platform: SimulatedPlatform
    wall_s: float


def simulate(
    settings: SimulationSettings, arrivals: Sequence[Iterator[TraceRequest]], until_s: float
) -> SimulatedRun:
    """Run the functions with these arrivals, in one thread."""
    began_s = time.perf_counter()
    profile, scaling = settings.profile, _scaling(settings, len(arrivals))
    cluster = SimulatedCluster(
        settings.nodes,
        len(arrivals),
        host_images=settings.host_images,
        host_ttl_s=settings.host_ttl_s,
        keeps_gpu=settings.keeps_gpu,
        keeps_copies=settings.mode.keeps_copies,
    )
    free_tokens = kv_tokens(profile) // (2 if len(arrivals) > 1 else 1)  # see TraceScenario.arena_bytes
    each = settings.kv_tokens or min(free_tokens, MIN_SEQUENCES * TYPICAL_TOKENS)
    figures = RunFigures(scaling=scaling, call_s=settings.overheads.call_s)
    platform = SimulatedPlatform(
        functions=[
            SimulatedFunction(
                number=number,
                scaling=scaling,
                arrivals=own,
                observed=ObservedCapacity(slots=MIN_SEQUENCES, kv_tokens=each),
            )
            for number, own in enumerate(arrivals)
        ],
        cluster=cluster,
        policy=_policy(scaling),
        engine=EngineModel(profile),
        start_times=StartTimes(profile, settings.mode, settings.overheads),
        overheads=settings.overheads,
        figures=figures,
        moves=settings.mode.moves,
    )
    with _without_collections():
        platform.run(until_s)
    wall_s = time.perf_counter() - began_s
    return SimulatedRun(figures=figures, cluster=cluster, platform=platform, wall_s=wall_s)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Suspend the garbage collector: a run makes many small objects, and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _policy(scaling: Scaling) -> ScalerPolicy:
    return LoadTarget() if scaling.policy is ScalingMode.LOAD else ConcurrencyTarget()


def _scaling(settings: SimulationSettings, functions: int) -> Scaling:
    """Return the scaling settings; a fixed mode divides its share of the nodes between the functions."""
    if not settings.mode.share:
        return settings.scaling
    each = int(settings.mode.share * settings.nodes) // functions
    if each < 1:
        raise ValueError(
            f"{settings.mode.name}: {functions} functions on {settings.nodes} nodes get none each"
        )
    return replace(settings.scaling, min_instances=each, max_instances=each)
