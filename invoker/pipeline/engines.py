"""Opens a stage over part of an image that may still be loading, with memory for K and V."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from invoker.base.errors import InvalidWork, NoSuchInstance
from invoker.engine.contract import EngineCall
from invoker.engine.kv.budget import kv_cache_bytes
from invoker.engine.kv.slices import KvSlice
from invoker.engine.stage_contract import Stage
from invoker.instances.calls import Calls
from invoker.instances.instance import Instance
from invoker.instances.starting import InstanceContext
from invoker.links.export_buffer import KvExportBuffer
from invoker.links.link import StageKey
from invoker.pipeline.metered import MeteredStage
from rdmacast.aio.threads import run_in_thread
from registry.messages.live import MAX_HELD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Dependencies of stages. `instance` looks an instance up by its id, or raises NoSuchInstance."""

    resources: InstanceContext
    calls: Calls
    instance: Callable[[str], Instance]


@asynccontextmanager
async def opened_stage(
    instance: Instance, first: int, last: int, context: StageContext, key: StageKey, exports: KvExportBuffer
) -> AsyncIterator[MeteredStage]:
    """Open a stage over layers `[first, last)` of the instance's image, once they are loaded.

    Other layers are never read. The stage exports K and V to `exports` under `key`. Users of the stage must
    end before the block does. Raises EngineError, OutOfDeviceMemory, NoSuchInstance.
    """
    resources = context.resources
    if not 0 <= first < last <= 8 * MAX_HELD_BYTES:
        raise InvalidWork(f"no model has the layers [{first}, {last})")
    await instance.wait_for_layers(first, last)
    spec, steps, device_image = instance.spec, instance.steps, instance.device_image
    if spec is None or steps is None or device_image is None:
        raise NoSuchInstance(f"instance {instance.id} is not a model, or is ending")
    if not 0 <= first < last <= spec.manifest.num_layers:
        raise InvalidWork(f"layers [{first}, {last}) of a model with {spec.manifest.num_layers}")
    ranged = replace(spec, layers=(first, last))
    least, _ = await run_in_thread(resources.engines.kv_bytes, ranged, instance.request.max_concurrency)
    # A pipeline takes the calls of all its nodes: each needs as much for its few layers as for all layers
    # of one instance.
    _, wanted = await run_in_thread(resources.engines.kv_bytes, spec, instance.request.max_concurrency)
    free = resources.arena.largest_free_bytes
    kv = resources.device_cache.reserve_region(
        kv_cache_bytes(min_bytes=least, wanted_bytes=wanted, largest_free_bytes=free)
    )
    try:
        stage: Stage = await run_in_thread(
            resources.engines.make_stage, ranged, device_image.region, kv, undo=lambda made: made.close()
        )

        def join(call_id: str) -> EngineCall:
            return context.calls.join(instance.account, call_id)

        loop = asyncio.get_running_loop()

        def export(sequence: str, kv: KvSlice) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(exports.add, replace(key, sequence=sequence), kv)

        metered = MeteredStage(stage, steps, join, export=export, rate=instance.prefill)
        try:
            yield metered
        finally:
            metered.close()
    finally:
        resources.device_cache.free_region(kv)
