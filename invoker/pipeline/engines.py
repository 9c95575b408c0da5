"""Opens a stage over part of an image that may still be loading, with memory for K and V."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial

from invoker.base.errors import InvalidWork, NoSuchInstance
from invoker.engine.contract import DeviceRegion, ModelSpec
from invoker.engine.stage_contract import Stage
from invoker.instances.calls import Calls, InstanceSteps
from invoker.instances.instance import Instance
from invoker.instances.start_context import InstanceContext
from invoker.links.export_buffer import KvExportBuffer
from invoker.links.link import StageKey
from invoker.pipeline.metered import MeteredStage
from invoker.traces.node import NodeTracing
from rdmacast.aio.threads import run_in_thread
from registry.messages.live import MAX_HELD_BYTES
from registry.tracing.span import AttributeValue


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Dependencies of stages. `instance` looks an instance up by its id, or raises NoSuchInstance.

    `tracing` is None on a node that exports no traces.
    """

    resources: InstanceContext
    calls: Calls
    instance: Callable[[str], Instance]
    tracing: NodeTracing | None = None


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
    spec, steps, image = model_of(instance)
    if not 0 <= first < last <= spec.manifest.num_layers:
        raise InvalidWork(f"layers [{first}, {last}) of a model with {spec.manifest.num_layers}")
    ranged = replace(spec, layers=(first, last))
    async with _kv_region(instance, spec, ranged, resources) as kv:
        stage: Stage = await run_in_thread(
            resources.engines.make_stage, ranged, image, kv, undo=lambda made: made.close()
        )
        join = partial(context.calls.join, instance.account)
        export = exports.exporter(key)
        spans = None if context.tracing is None else context.tracing.stage("stage", _described(key, ranged))
        made = MeteredStage(stage, steps, join, export=export, rate=instance.prefill, spans=spans)
        with closing(made) as metered:
            yield metered


def _described(key: StageKey, ranged: ModelSpec) -> dict[str, AttributeValue]:
    first, last = ranged.layers or (0, ranged.manifest.num_layers)
    return {
        "hypercast.pipeline": key.pipeline,
        "hypercast.epoch": key.epoch,
        "hypercast.stage": key.place,
        "hypercast.first_layer": first,
        "hypercast.last_layer": last - 1,
    }


@asynccontextmanager
async def _kv_region(
    instance: Instance, spec: ModelSpec, ranged: ModelSpec, resources: InstanceContext
) -> AsyncIterator[DeviceRegion | None]:
    """Hold memory for K and V of a stage: a member of a group has reserved it with its layers."""
    if instance.request.group is not None:
        yield instance.kv
        return
    least, _ = await run_in_thread(resources.engines.kv_bytes, ranged, instance.request.max_concurrency)
    # A pipeline takes the calls of all its nodes: each needs as much for its few layers as for all layers
    # of one instance.
    _, wanted = await run_in_thread(resources.engines.kv_bytes, spec, instance.request.max_concurrency)
    with resources.device_cache.kv_region(least, wanted) as kv:
        yield kv


def model_of(instance: Instance) -> tuple[ModelSpec, InstanceSteps, DeviceRegion]:
    """Return the model of an instance, the meter of its steps and its image. Raises NoSuchInstance."""
    spec, steps, image = instance.spec, instance.steps, instance.device_image
    if spec is None or steps is None or image is None:
        raise NoSuchInstance(f"instance {instance.id} is not a model, or is ending")
    return spec, steps, image.region
