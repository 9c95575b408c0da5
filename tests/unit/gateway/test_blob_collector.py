"""The lease of registration and collection: held for as long as the work lasts, which ends without it."""

import asyncio

import pytest

from gateway.api.blob_collector import BlobCollector
from gateway.cluster.condition import ChangeCondition
from gateway.core.errors import Unavailable
from gateway.fakes.dispatcher import MemoryBlobs
from registry.clock import Clock, FakeClock, SystemClock
from registry.memory.state import MemoryState
from registry.records.fence import Fence

LEASE_S = 0.3


class RenewedState(MemoryState):
    """A state that counts how often a lease was acquired or renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.changes = ChangeCondition()

    async def acquire_lease(self, name: str, holder: str, ttl_s: float) -> Fence | None:
        fence = await super().acquire_lease(name, holder, ttl_s)
        self.held += fence is not None
        self.changes.notify()
        return fence


def collector_of(state: MemoryState, clock: Clock | None = None) -> BlobCollector:
    return BlobCollector(MemoryBlobs(), state, clock or SystemClock(), grace_s=0.0, lease_s=LEASE_S)


async def test_no_other_gateway_collects_while_a_slow_store_delays_a_registration() -> None:
    state, ended = RenewedState(), asyncio.Event()

    async def register() -> None:
        async with collector_of(state).exclusive():
            await ended.wait()

    registration = asyncio.create_task(register())
    other = asyncio.create_task(collector_of(state).sweep())
    await state.changes.wait_for(lambda: state.held >= 24)  # six times in each of four times to live
    assert not other.done()
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
    state, clock = MemoryState(), FakeClock()
    with pytest.raises(Unavailable, match="lost"):
        async with collector_of(state, clock).exclusive() as lease:
            state._leases.clear()
            await state.acquire_lease("blobs", "other", 60)
            clock.advance(LEASE_S / 5)  # so that it is due
            await lease.renew()
