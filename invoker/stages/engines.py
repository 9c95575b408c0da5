"""A stage's engine over a part of an image that may still be arriving, and the memory that it needs."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from invoker.calls import Calls
from invoker.engine.contract import EngineCall
from invoker.engine.stage_contract import Stage
from invoker.errors import BadWork, NoSuchInstance
from invoker.instance import Instance
from invoker.kv_budget import kv_cache_bytes
from invoker.stages.metered import MeteredStage
from invoker.starting import Equipment
from invoker.threads import in_thread


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGear:
    """What stages are made with. `instance` gives the instance of an id, or raises NoSuchInstance."""

    gear: Equipment
    calls: Calls
    instance: Callable[[str], Instance]


@asynccontextmanager
async def opened_stage(
    instance: Instance, first: int, last: int, made_with: StageGear
) -> AsyncIterator[MeteredStage]:
    """The layers `[first, last)` in the instance's memory, as soon as they are there; the others are never
    read. Whoever uses it ends before the block does. Raises EngineError, OutOfDeviceMemory, NoSuchInstance.
    """
    gear = made_with.gear
    await instance.holds(first, last)
    spec, steps, resident = instance.spec, instance.steps, instance.resident
    if spec is None or steps is None or resident is None:
        raise NoSuchInstance(f"instance {instance.id} is no model, or is ending")
    if not 0 <= first < last <= spec.manifest.num_layers:
        raise BadWork(f"layers [{first}, {last}) of a model with {spec.manifest.num_layers}")
    ranged = replace(spec, layers=(first, last))
    least, wanted = await in_thread(gear.engines.kv_bytes, ranged, instance.request.max_concurrency)
    free = gear.arena.largest_free_bytes
    kv = gear.residents.reserve_region(
        kv_cache_bytes(least_bytes=least, wanted_bytes=wanted, largest_free_bytes=free)
    )
    try:
        stage: Stage = await in_thread(
            gear.engines.make_stage, ranged, resident.region, kv, undo=lambda made: made.close()
        )

        def join(call_id: str) -> EngineCall:
            return made_with.calls.joined(instance.account, call_id)

        metered = MeteredStage(stage, steps, join)
        try:
            yield metered
        finally:
            metered.close()
    finally:
        gear.residents.free_region(kv)
