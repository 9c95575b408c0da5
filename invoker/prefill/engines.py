"""Single-layer stages over one KV region, for layer-wise prefill."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial

from invoker.engine.contract import DeviceRegion, ModelSpec
from invoker.engine.stage_contract import Stage
from invoker.instances.instance import Instance
from invoker.memory.arena import Region
from invoker.pipeline.engines import StageContext, model_of
from invoker.pipeline.metered import StepCalls
from rdmacast.aio.threads import run_in_thread
from registry.tracing.span import AttributeValue

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True, eq=False)
class _SubRegion:
    """A DeviceRegion within another."""

    nbytes: int
    pointer: int
    device: str
    buffer: memoryview | None


class LayerStageFactory:
    """Creates single-layer stages of an instance; each has an equal share of the region `kv`."""

    def __init__(
        self, instance: Instance, spec: ModelSpec, image: DeviceRegion, kv: Region, context: StageContext
    ) -> None:
        self.layers = spec.manifest.num_layers
        self._instance = instance
        self._spec = spec
        self._image = image
        self._kv = kv
        self._context = context
        self._stages: list[Stage] = []

    def __repr__(self) -> str:
        return f"<LayerMaker of {self.layers} layers for {self._instance!r}>"

    def calls(self) -> StepCalls:
        """Return the calls that these stages' steps are charged to. Raises NoSuchInstance."""
        _, steps, _ = model_of(self._instance)
        tracing = self._context.tracing
        attributes: dict[str, AttributeValue] = {"hypercast.instance": self._instance.id}
        spans = None if tracing is None else tracing.stage("prefill layers", attributes)
        return StepCalls(steps, partial(self._context.calls.join, self._instance.account), spans)

    async def make(self, layer: int) -> Stage:
        """Create the stage of a layer once its bytes are loaded. Raises EngineError, NoSuchInstance."""
        await self._instance.wait_for_layers(layer, layer + 1)
        ranged = replace(self._spec, layers=(layer, layer + 1))
        stage: Stage = await run_in_thread(
            self._context.resources.engines.make_stage,
            ranged,
            self._image,
            self._kv_share(layer),
            undo=lambda made: made.close(),
        )
        self._stages.append(stage)
        return stage

    def close(self) -> None:
        """Close all stages, so that the memory can be freed."""
        for stage in self._stages:
            stage.close()

    def _kv_share(self, layer: int) -> _SubRegion:
        nbytes = self._kv.nbytes // self.layers // _ALIGNMENT * _ALIGNMENT
        start, buffer = layer * nbytes, self._kv.buffer
        return _SubRegion(
            nbytes=nbytes,
            pointer=self._kv.pointer + start,
            device=self._kv.device,
            buffer=None if buffer is None else buffer[start : start + nbytes],
        )


@asynccontextmanager
async def layer_stage_factory(instance: Instance, context: StageContext) -> AsyncIterator[LayerStageFactory]:
    """Yield a factory with room for K and V of queued prompts in each layer.

    Users of its stages must end before the block does. Raises OutOfDeviceMemory, NoSuchInstance, EngineError.
    """
    await instance.wait_for_layers(0, 1)
    resources, (spec, _, image) = context.resources, model_of(instance)
    layers = spec.manifest.num_layers
    one = replace(spec, layers=(0, 1))
    minimum, wanted = await run_in_thread(resources.engines.kv_bytes, one, instance.request.max_concurrency)
    minimum, wanted = (-(-nbytes // _ALIGNMENT) * _ALIGNMENT * layers for nbytes in (minimum, wanted))
    with resources.device_cache.kv_region(minimum, wanted) as kv:
        with closing(LayerStageFactory(instance, spec, image, kv, context)) as factory:
            yield factory
