"""The end of an instance: what still uses its memory ends before it is freed, and nothing new begins."""

from collections.abc import Awaitable, Callable

import pytest

from invoker.base.errors import NoSuchInstance
from invoker.engine.contract import ModelSpec
from invoker.instances.calls import InstanceSteps
from invoker.instances.device_cache import DeviceCache
from invoker.instances.instance import Instance
from invoker.instances.lifecycle import accepted
from invoker.instances.start_context import free_device
from invoker.instances.starting import release
from invoker.memory.arena import CpuArena
from invoker.metering.meter import GpuMeter
from invoker.pipeline.engines import model_of
from registry.clock import FakeClock
from registry.records.instance import InstanceState
from tests.fixtures.invoker import KIB, make_image, start_request

pytestmark = pytest.mark.anyio
IMAGE = make_image("a", KIB)


class Attachment:
    """Notes, while it ends, what the arena has, and whether another one could use the instance."""

    def __init__(self, instance: Instance, arena: CpuArena) -> None:
        self._instance = instance
        self._arena = arena
        self.free_bytes = -1
        instance.attachments.add(self)

    async def aclose(self) -> None:
        self.free_bytes = self._arena.free_bytes
        with pytest.raises(NoSuchInstance):
            model_of(self._instance)
        self._instance.attachments.discard(self)


@pytest.mark.parametrize("end", [release, free_device])
async def test_attachments_end_before_their_memory_is_freed(
    end: Callable[[Instance, DeviceCache], Awaitable[None]],
) -> None:
    arena = CpuArena(16 * KIB)
    cache = DeviceCache(arena, 0.0, FakeClock(), lambda: None, lambda _: None)
    meter = GpuMeter("n0", 1, lambda: 0, 0.0)
    account = meter.open_account("i", "f", 1, InstanceState.READY)
    request = start_request("i", IMAGE)
    instance = Instance(request, accepted(request, "n0", wall_s=0, now_s=0), account, lambda _: None)
    instance.spec = ModelSpec(manifest=IMAGE.manifest, config={}, dtype="float32", context_length=1)
    instance.steps = InstanceSteps(meter, account)
    instance.device_image, instance.kv = cache.reserve(IMAGE.digest, KIB), cache.reserve_region(KIB)
    cache.settle(instance.device_image, loaded=True)
    used_bytes = arena.free_bytes
    model_of(instance)
    attachments = [Attachment(instance, arena) for _ in range(2)]
    await end(instance, cache)
    assert [one.free_bytes for one in attachments] == [used_bytes, used_bytes]
    assert arena.free_bytes > used_bytes and not instance.attachments
    await end(instance, cache)
    arena.close()
