"""The layers of a pair on its two nodes: single-layer stages over one region of keys and values."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from invoker.arena import Region
from invoker.engine.contract import DeviceRegion, EngineCall, ModelSpec
from invoker.engine.stage_contract import Stage
from invoker.errors import NoSuchInstance
from invoker.instance import Instance
from invoker.kv_budget import kv_cache_bytes
from invoker.stages.engines import StageGear
from invoker.stages.metered import StepCalls
from invoker.threads import in_thread

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """A DeviceRegion that is a part of another."""

    nbytes: int
    pointer: int
    device: str
    buffer: memoryview | None


class LayerMaker:
    """Makes the stage of any of an instance's layers; each has an equal share of the region `kv`."""

    def __init__(
        self, instance: Instance, spec: ModelSpec, image: DeviceRegion, kv: Region, gear: StageGear
    ) -> None:
        self.layers = spec.manifest.num_layers
        self._instance = instance
        self._spec = spec
        self._image = image
        self._kv = kv
        self._gear = gear
        self._made: list[Stage] = []

    def __repr__(self) -> str:
        return f"<LayerMaker of {self.layers} layers for {self._instance!r}>"

    def calls(self) -> StepCalls:
        """Whom the steps of these stages are run for. Raises NoSuchInstance."""
        steps, account = self._instance.steps, self._instance.account
        if steps is None:
            raise NoSuchInstance(f"instance {self._instance.id} is ending")

        def join(call_id: str) -> EngineCall:
            return self._gear.calls.joined(account, call_id)

        return StepCalls(steps, join)

    async def make(self, layer: int) -> Stage:
        """As soon as the layer's bytes are there. Raises EngineError, NoSuchInstance."""
        await self._instance.holds(layer, layer + 1)
        ranged = replace(self._spec, layers=(layer, layer + 1))
        stage: Stage = await in_thread(
            self._gear.gear.engines.make_stage,
            ranged,
            self._image,
            self._share(layer),
            undo=lambda made: made.close(),
        )
        self._made.append(stage)
        return stage

    def close(self) -> None:
        """All stages let go of the memory."""
        for stage in self._made:
            stage.close()

    def _share(self, layer: int) -> _Share:
        nbytes = self._kv.nbytes // self.layers // _ALIGNMENT * _ALIGNMENT
        start, buffer = layer * nbytes, self._kv.buffer
        return _Share(
            nbytes=nbytes,
            pointer=self._kv.pointer + start,
            device=self._kv.device,
            buffer=None if buffer is None else buffer[start : start + nbytes],
        )


@asynccontextmanager
async def layer_maker(instance: Instance, made_with: StageGear, *, waits: bool) -> AsyncIterator[LayerMaker]:
    """With room for K and V of one prompt in each layer, or of all that may wait, if they do that here.
    Whoever uses what was made ends before the block does. Raises OutOfDeviceMemory, NoSuchInstance,
    EngineError."""
    gear, spec, resident = made_with.gear, instance.spec, instance.resident
    if spec is None or resident is None:
        raise NoSuchInstance(f"instance {instance.id} is no model, or is ending")
    layers = spec.manifest.num_layers
    one = replace(spec, layers=(0, 1))
    least, wanted = await in_thread(gear.engines.kv_bytes, one, instance.request.max_concurrency)
    least, wanted = (-(-nbytes // _ALIGNMENT) * _ALIGNMENT * layers for nbytes in (least, wanted))
    free = gear.arena.largest_free_bytes
    kv = gear.residents.reserve_region(
        kv_cache_bytes(least_bytes=least, wanted_bytes=wanted if waits else least, largest_free_bytes=free)
    )
    maker = LayerMaker(instance, spec, resident.region, kv, made_with)
    try:
        yield maker
    finally:
        maker.close()
        gear.residents.free_region(kv)
