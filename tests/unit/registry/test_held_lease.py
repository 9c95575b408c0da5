"""A lease whose acquire ends without a reply: the next holder need not wait for its time to live."""

import asyncio

import pytest

from registry.clock import SystemClock
from registry.errors import Conflict, StateUnavailable
from registry.held_lease import hold_lease
from registry.memory.state import MemoryState
from registry.records.fence import Fence


class SilentState(MemoryState):
    """A state that grants a lease and then never replies, or fails."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.granted = asyncio.Event()

    async def acquire_lease(self, name: str, holder: str, ttl_s: float) -> Fence | None:
        fence = await super().acquire_lease(name, holder, ttl_s)
        if self.granted.is_set():
            return fence
        self.granted.set()
        if self.fails:
            raise StateUnavailable("no reply")
        return await asyncio.Future()


async def hold(state: MemoryState) -> None:
    async with hold_lease(state, SystemClock(), "work", ttl_s=3600, taken="taken"):
        pass


async def test_a_lease_is_free_after_an_acquire_that_failed() -> None:
    state = SilentState(fails=True)
    with pytest.raises(StateUnavailable):
        await hold(state)
    await hold(state)


async def test_a_lease_is_free_after_an_acquire_that_was_cancelled() -> None:
    state = SilentState(fails=False)
    holding = asyncio.create_task(hold(state))
    await state.granted.wait()
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    await hold(state)


async def test_a_refused_holder_leaves_the_lease_to_the_other() -> None:
    state = MemoryState()
    async with hold_lease(state, SystemClock(), "work", ttl_s=3600, taken="taken") as lease:
        for _ in range(2):
            with pytest.raises(Conflict, match="taken"):
                await hold(state)
        assert lease.epoch
