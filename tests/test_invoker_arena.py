"""The CPU arena, and the images that live in it."""

import asyncio

import pytest

from invoker.arena import COPY_CHUNK_BYTES, CpuArena, copy_following
from invoker.errors import OutOfDeviceMemory
from invoker.kv_budget import kv_cache_bytes
from invoker.residents import Residents, ResidentState
from rdmacast.region import GrowingRegion
from registry.clock import FakeClock

MIB = 1 << 20


def test_regions_are_aligned_and_apart() -> None:
    arena = CpuArena(MIB)
    first, second = arena.reserve(1000), arena.reserve(5)
    assert first.pointer % 256 == second.pointer % 256 == 0
    assert first.buffer is not None and second.buffer is not None
    arena.copy_in(first, 0, memoryview(b"a" * 1000))
    arena.copy_in(second, 1, memoryview(b"bc"))
    assert bytes(first.buffer) == b"a" * 1000 and bytes(second.buffer)[1:3] == b"bc"
    with pytest.raises(OutOfDeviceMemory, match="1048576 bytes on cpu: 1047296 are free"):
        arena.reserve(MIB)
    arena.free(first)
    arena.free(second)
    arena.check_integrity()
    with pytest.raises(ValueError):
        arena.free(first)
    assert arena.largest_free_bytes == MIB
    arena.close()


def test_a_copy_follows_the_bytes_that_arrive() -> None:
    async def scenario() -> None:
        size = 2 * COPY_CHUNK_BYTES + 77
        data = bytes(range(256)) * (size // 256 + 1)
        source = memoryview(bytearray(data[:size]))
        growing, arena = GrowingRegion(source), CpuArena(64 * MIB)
        region = arena.reserve(size)
        seen: list[int] = []
        some = asyncio.Event()

        def on_copied(nbytes: int) -> None:
            seen.append(nbytes)
            some.set()

        copying = asyncio.create_task(
            copy_following(arena, region, source.toreadonly(), growing.wait_for, on_copied)
        )
        growing.mark(0, COPY_CHUNK_BYTES + 100)
        await some.wait()
        assert seen == [COPY_CHUNK_BYTES]
        growing.mark(COPY_CHUNK_BYTES, size - COPY_CHUNK_BYTES)
        copied = await copying
        assert copied.nbytes == size and copied.gb_per_s > 0
        assert region.buffer == source
        arena.close()

    asyncio.run(scenario())


def residents_of(nbytes: int, keep_hot_s: float) -> tuple[CpuArena, Residents, list[int]]:
    arena, changes = CpuArena(nbytes), []
    return arena, Residents(arena, keep_hot_s, FakeClock(), lambda: changes.append(1)), changes


def test_an_image_without_users_is_freed_at_once_by_default() -> None:
    async def scenario() -> None:
        arena, residents, changes = residents_of(MIB, 0.0)
        resident = residents.reserve("a", 1000)
        assert not residents.holds("a") and residents.buffer("a") is None
        residents.settle(resident, loaded=True)
        assert residents.holds("a") and residents.acquire("a") is resident
        residents.release(resident)
        assert residents.holds("a")
        residents.release(resident)
        assert resident.state is ResidentState.GONE and arena.free_bytes == MIB
        assert len(changes) == 3
        arena.close()

    asyncio.run(scenario())


def test_idle_images_make_room_least_recently_used_first() -> None:
    async def scenario() -> None:
        clock, arena = FakeClock(), CpuArena(3 * MIB)
        residents = Residents(arena, 60.0, clock, lambda: None)
        for name in "abc":
            resident = residents.reserve(name, MIB)
            residents.settle(resident, loaded=True)
            residents.release(resident)
            clock.advance(1.0)
        used = residents.acquire("a")
        assert used is not None
        residents.free_region(residents.reserve_region(MIB))
        assert [residents.holds(name) for name in "abc"] == [True, False, True]
        with pytest.raises(OutOfDeviceMemory):
            residents.reserve_region(3 * MIB)
        assert residents.holds("c"), "nothing is evicted for what cannot fit anyway"
        assert not residents.drop("a") and residents.drop("c")
        residents.release(used)
        assert residents.evictions == 1
        arena.close()

    asyncio.run(scenario())


def test_those_who_joined_a_load_learn_of_its_end() -> None:
    async def scenario() -> None:
        arena, residents, _ = residents_of(MIB, 60.0)
        resident = residents.reserve("a", 1000)
        joined = residents.acquire("a")
        assert joined is resident
        residents.settle(resident, loaded=False)
        residents.release(resident)
        await joined.settled.wait()
        assert joined.state is ResidentState.GONE and residents.acquire("a") is None
        again = residents.reserve("a", 1000)
        residents.release(joined)
        assert arena.free_bytes == MIB - 1024
        residents.settle(again, loaded=False)
        residents.release(again)
        assert arena.free_bytes == MIB
        arena.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("least", "wanted", "free", "expected"),
    [(10, 80, 1000, 80), (10, 80, 100, 50), (90, 80, 100, 90), (90, 900, 50, 90), (0, 0, 100, 0)],
)
def test_the_kv_cache_takes_half_of_what_is_left_but_one_context_at_least(
    least, wanted, free, expected
) -> None:
    assert kv_cache_bytes(least_bytes=least, wanted_bytes=wanted, largest_free_bytes=free) == expected
