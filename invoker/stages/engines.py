"""A stage's engine over a part of an image that may still be arriving, and the memory that it needs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from invoker.calls import Calls
from invoker.engine.contract import EngineCall
from invoker.engine.kv_slices import KvSlice
from invoker.engine.stage_contract import Stage
from invoker.errors import BadWork, NoSuchInstance
from invoker.instance import Instance
from invoker.kv_budget import kv_cache_bytes
from invoker.stages.kv_shelf import KvShelf
from invoker.stages.link import StageKey
from invoker.stages.metered import MeteredStage
from invoker.starting import Equipment
from invoker.threads import in_thread
from registry.live_messages import MAX_HELD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGear:
    """What stages are made with. `instance` gives the instance of an id, or raises NoSuchInstance."""

    gear: Equipment
    calls: Calls
    instance: Callable[[str], Instance]


@asynccontextmanager
async def opened_stage(
    instance: Instance, first: int, last: int, made_with: StageGear, key: StageKey, shelf: KvShelf
) -> AsyncIterator[MeteredStage]:
    """The layers `[first, last)` in the instance's memory, as soon as they are there; the others are never
    read. What it puts aside lies on the shelf by its key. Whoever uses it ends before the block does. Raises
    EngineError, OutOfDeviceMemory, NoSuchInstance.
    """
    gear = made_with.gear
    if not 0 <= first < last <= 8 * MAX_HELD_BYTES:
        raise BadWork(f"no model has the layers [{first}, {last})")
    await instance.holds(first, last)
    spec, steps, resident = instance.spec, instance.steps, instance.resident
    if spec is None or steps is None or resident is None:
        raise NoSuchInstance(f"instance {instance.id} is no model, or is ending")
    if not 0 <= first < last <= spec.manifest.num_layers:
        raise BadWork(f"layers [{first}, {last}) of a model with {spec.manifest.num_layers}")
    ranged = replace(spec, layers=(first, last))
    least, _ = await in_thread(gear.engines.kv_bytes, ranged, instance.request.max_concurrency)
    # A pipeline takes the calls of all its nodes: for its few layers each needs as much as for all layers
    # of its own.
    _, wanted = await in_thread(gear.engines.kv_bytes, spec, instance.request.max_concurrency)
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

        loop = asyncio.get_running_loop()

        def put_aside(sequence: str, one: KvSlice) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody goes on here
                loop.call_soon_threadsafe(shelf.put, replace(key, sequence=sequence), one)

        metered = MeteredStage(stage, steps, join, aside=put_aside, rate=instance.prefill)
        try:
            yield metered
        finally:
            metered.close()
    finally:
        gear.residents.free_region(kv)
