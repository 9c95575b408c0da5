"""The CPU arena, and the images that live in it."""

import asyncio
from functools import partial

import pytest

from invoker.base.errors import HostTierFull, OutOfDeviceMemory
from invoker.engine.kv.budget import kv_cache_bytes
from invoker.instances.device_cache import Copying, DeviceCache, DeviceImageState
from invoker.instances.device_copy import ImagePiece, copy_arriving, copy_in, cut_spans
from invoker.memory.arena import COPY_CHUNK_BYTES, CpuArena
from rdmacast.server.region import GrowingRegion
from registry.clock import FakeClock
from tests.fixtures.patience import until

MIB = 1 << 20


async def test_regions_are_aligned_and_apart() -> None:
    arena = CpuArena(MIB)
    first, second = arena.reserve(1000), arena.reserve(5)
    assert first.pointer % 256 == second.pointer % 256 == 0
    assert first.buffer is not None and second.buffer is not None
    await copy_in(arena, first, 0, memoryview(b"a" * 1000))
    await copy_in(arena, second, 1, memoryview(b"bc"))
    assert bytes(first.buffer) == b"a" * 1000 and bytes(second.buffer)[1:3] == b"bc"
    with pytest.raises(OutOfDeviceMemory, match="1048576 bytes on cpu: 1047296 bytes are free"):
        arena.reserve(MIB)
    arena.free(first)
    arena.free(second)
    arena.check_integrity()
    with pytest.raises(ValueError):
        arena.free(first)
    assert arena.largest_free_bytes == MIB
    arena.close()


async def test_a_copy_follows_the_bytes_that_arrive() -> None:
    size = 2 * COPY_CHUNK_BYTES + 77
    data = bytes(range(256)) * (size // 256 + 1)
    source = memoryview(bytearray(data[:size]))
    growing, arena = GrowingRegion(source), CpuArena(64 * MIB)
    region = arena.reserve(size)
    seen: list[int] = []
    some = asyncio.Event()

    def on_copied(piece: ImagePiece) -> None:
        seen.append(piece.end)
        some.set()

    pieces = cut_spans([(0, size, None)], arena.copy_bytes)
    copying = asyncio.create_task(
        copy_arriving(arena, region, source.toreadonly(), pieces, growing.wait_for, on_copied)
    )
    growing.mark(0, COPY_CHUNK_BYTES + 100)
    await some.wait()
    assert seen == [COPY_CHUNK_BYTES]
    growing.mark(COPY_CHUNK_BYTES, size - COPY_CHUNK_BYTES)
    copied = await copying
    assert copied.nbytes == size and copied.gb_per_s > 0
    assert region.buffer == source
    arena.close()


def device_cache_of(nbytes: int, keep_hot_s: float) -> tuple[CpuArena, DeviceCache, list[int]]:
    arena, changes = CpuArena(nbytes), []
    return (
        arena,
        DeviceCache(arena, keep_hot_s, FakeClock(), lambda: changes.append(1), lambda _: None),
        changes,
    )


async def test_an_image_without_users_is_freed_at_once_if_none_is_kept() -> None:
    arena, device_cache, changes = device_cache_of(MIB, 0.0)
    device_image = device_cache.reserve("a", 1000)
    assert not device_cache.holds("a") and device_cache.buffer("a") is None
    device_cache.settle(device_image, loaded=True)
    assert device_cache.holds("a") and device_cache.acquire("a") is device_image
    device_cache.release(device_image)
    assert device_cache.holds("a")
    device_cache.release(device_image)
    assert device_image.state is DeviceImageState.REMOVED and arena.free_bytes == MIB
    assert len(changes) == 3
    arena.close()


async def test_a_kv_cache_is_as_large_as_without_idle_images_and_evicts_them() -> None:
    arena, device_cache, _ = device_cache_of(8 * MIB, 60.0)
    for name in "ab":
        device_image = device_cache.reserve(name, 2 * MIB)
        device_cache.settle(device_image, loaded=True)
        device_cache.release(device_image)
    used = device_cache.acquire("b")
    assert used is not None
    assert device_cache.largest_room_bytes == 4 * MIB == arena.largest_free_bytes
    with device_cache.kv_region(MIB, 100 * MIB) as kv:  # half of the six that are not in use
        assert kv.nbytes == 3 * MIB and device_cache.holds("a")
        with device_cache.kv_region(MIB, 100 * MIB) as further:
            assert further.nbytes == 1.5 * MIB and not device_cache.holds("a")


async def test_idle_images_make_room_least_recently_used_first() -> None:
    clock, arena = FakeClock(), CpuArena(3 * MIB)
    device_cache = DeviceCache(arena, 60.0, clock, lambda: None, lambda _: None)
    for name in "abc":
        device_image = device_cache.reserve(name, MIB)
        device_cache.settle(device_image, loaded=True)
        device_cache.release(device_image)
        clock.advance(1.0)
    used = device_cache.acquire("a")
    assert used is not None
    device_cache.free_region(device_cache.reserve_region(MIB))
    assert [device_cache.holds(name) for name in "abc"] == [True, False, True]
    with pytest.raises(OutOfDeviceMemory):
        device_cache.reserve_region(3 * MIB)
    assert device_cache.holds("c"), "nothing is evicted for what cannot fit anyway"
    assert not device_cache.drop("a") and device_cache.drop("c")
    device_cache.release(used)
    assert device_cache.evictions == 1
    arena.close()


class Demotions:
    """Copies to host memory which end when `done` is set."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.done = asyncio.Event()
        self.error: Exception | None = None

    def __call__(self, image: str) -> Copying:
        return partial(self._copy, image)

    async def _copy(self, image: str) -> None:
        self.started.set()
        try:
            await self.done.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.ended.set()


async def demoting() -> tuple[DeviceCache, Demotions]:
    """Return a cache with the idle image "a", whose copy to host memory has started."""
    demotions = Demotions()
    cache = DeviceCache(CpuArena(MIB), 0.0, FakeClock(), lambda: None, lambda _: None, demotions)
    device_image = cache.reserve("a", MIB // 2)
    cache.settle(device_image, loaded=True)
    cache.release(device_image)
    await demotions.started.wait()
    return cache, demotions


@pytest.mark.parametrize("error", [None, HostTierFull("no room")], ids=["copied", "failed"])
async def test_an_idle_image_is_copied_to_host_memory_before_it_is_freed(error: Exception | None) -> None:
    cache, demotions = await demoting()
    assert cache.holds("a")
    demotions.error = error
    demotions.done.set()
    await until(lambda: not cache.holds("a"))
    assert demotions.ended.is_set()


async def test_an_image_used_again_while_it_is_copied_stays() -> None:
    cache, demotions = await demoting()
    used = cache.acquire("a")
    demotions.done.set()
    await demotions.ended.wait()
    assert used is not None and cache.holds("a")
    cache.release(used)
    await until(lambda: not cache.holds("a"))


async def test_room_that_is_needed_does_not_wait_for_the_copy() -> None:
    cache, demotions = await demoting()
    cache.free_region(cache.reserve_region(MIB))
    assert not cache.holds("a") and not demotions.ended.is_set()
    await cache.aclose()


async def test_a_rejected_image_is_not_copied_on() -> None:
    cache, demotions = await demoting()
    cache.reject("a")
    await demotions.ended.wait()
    assert not demotions.done.is_set() and not cache.holds("a")


async def test_closing_ends_the_copies() -> None:
    cache, demotions = await demoting()
    await cache.aclose()
    assert demotions.ended.is_set()


async def test_those_who_joined_a_load_learn_of_its_end() -> None:
    arena, device_cache, _ = device_cache_of(MIB, 60.0)
    device_image = device_cache.reserve("a", 1000)
    joined = device_cache.acquire("a")
    assert joined is device_image
    device_cache.settle(device_image, loaded=False)
    device_cache.release(device_image)
    await joined.settled.wait()
    assert joined.state is DeviceImageState.REMOVED and device_cache.acquire("a") is None
    again = device_cache.reserve("a", 1000)
    device_cache.release(joined)
    assert arena.free_bytes == MIB - 1024
    device_cache.settle(again, loaded=False)
    device_cache.release(again)
    assert arena.free_bytes == MIB
    arena.close()


@pytest.mark.parametrize(
    ("least", "wanted", "room", "largest", "expected"),
    [
        *((10, 80, 1000, 1000, 80), (10, 80, 100, 100, 50), (10, 80, 100, 40, 40)),
        *((90, 80, 100, 100, 90), (90, 900, 50, 50, 90), (0, 0, 100, 100, 0)),
    ],
)
def test_the_kv_cache_takes_half_of_what_is_left_but_one_context_at_least(
    least, wanted, room, largest, expected
) -> None:
    found = kv_cache_bytes(min_bytes=least, wanted_bytes=wanted, room_bytes=room, largest_room_bytes=largest)
    assert found == expected


async def test_instances_of_a_node_have_kv_caches_of_their_own_each_of_half_of_what_is_free() -> None:
    arena, device_cache, _ = device_cache_of(8 * MIB, 0.0)
    with device_cache.kv_region(MIB, 100 * MIB) as first:
        with device_cache.kv_region(MIB, 100 * MIB) as second:
            assert (first.nbytes, second.nbytes) == (4 * MIB, 2 * MIB)
            assert arena.free_bytes == 2 * MIB
            with device_cache.kv_region(2 * MIB, 100 * MIB) as third:  # one whole context at least
                assert third.nbytes == 2 * MIB
                with pytest.raises(OutOfDeviceMemory), device_cache.kv_region(MIB, MIB):
                    pass
    assert arena.free_bytes == 8 * MIB
    arena.close()
