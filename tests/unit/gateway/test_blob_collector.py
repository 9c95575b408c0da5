"""The lease of registration and collection: held for as long as the work lasts, which ends without it."""

import asyncio

import pytest

from gateway.api.blob_collector import BlobCollector
from gateway.core.errors import Unavailable
from gateway.fakes.dispatcher import MemoryBlobs
from registry.clock import SystemClock
from registry.memory.state import MemoryState

LEASE_S = 0.3


def collector_of(state: MemoryState) -> BlobCollector:
    return BlobCollector(MemoryBlobs(), state, SystemClock(), grace_s=0.0, lease_s=LEASE_S)


async def test_no_other_gateway_collects_while_a_slow_store_delays_a_registration() -> None:
    state, ended, clock = MemoryState(), asyncio.Event(), SystemClock()

    async def register() -> None:
        async with collector_of(state).exclusive():
            await ended.wait()

    registration = asyncio.create_task(register())
    other = asyncio.create_task(collector_of(state).sweep())
    until_s = clock.monotonic_s() + 4 * LEASE_S
    while clock.monotonic_s() < until_s:
        assert not other.done()
        await asyncio.sleep(LEASE_S / 10)
    ended.set()
    await registration
    assert await other == []


async def test_work_ends_once_the_lease_is_lost() -> None:
    state = MemoryState()

    async def register() -> None:
        async with collector_of(state).exclusive():
            state._leases.clear()  # as a restore of Redis would
            await state.acquire_lease("blobs", "other", 60)
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        with pytest.raises(Unavailable, match="lost"):
            await register()
    assert await state.acquire_lease("blobs", "other", 60) is not None  # not released by the loser


async def test_a_step_after_the_loss_is_refused() -> None:
    state = MemoryState()
    with pytest.raises(Unavailable, match="lost"):
        async with collector_of(state).exclusive() as lease:
            state._leases.clear()
            await state.acquire_lease("blobs", "other", 60)
            await asyncio.sleep(LEASE_S / 5)
            await lease.renew()
