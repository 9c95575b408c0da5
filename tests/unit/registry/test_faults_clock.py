"""The time of day is set: leases, leadership and what nodes report depend on durations."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway.cluster.condition import ChangeCondition
from gateway.control.leadership import Leadership
from invoker.publisher import Publisher
from registry.clock import FakeClock
from registry.memory.state import MemoryState
from registry.records.change import InstanceChanged
from registry.records.fence import Fence
from registry.records.instance import InstanceRecord
from registry.records.node import NodeRecord
from registry.records.usage import InstanceInterval, LostCall
from registry.redis.connections import Argument, ConnectionPool, LuaScript
from registry.redis.lease import RedisLeases
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import instance, node


class NothingDue:
    def next_record(self) -> tuple[int, InstanceInterval | LostCall] | None:
        return None

    def acknowledge(self, number: int) -> None:
        raise AssertionError("nothing was due")


class Forgetful(MemoryState):
    """A state whose keys expire when the test says so."""

    def clear_instances(self) -> None:
        for known in self._nodes.values():
            known.clear_instances()


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
async def test_a_leader_stays_leader_when_the_clock_is_set(step_s: float):
    clock = FakeClock()
    state = MemoryState(clock=clock)
    changes = ChangeCondition()
    leadership = Leadership(state, "g", changes, clock, ttl_s=2.5)
    leading = asyncio.create_task(leadership.run())
    await changes.wait_for(lambda: leadership.epoch is not None)
    clock.step_wall(step_s)
    assert leadership.epoch == 1
    assert await state.acquire_lease("controller", "other", 2.5) is None
    clock.advance(2.5)
    assert leadership.epoch is None  # it depends on the time that has passed
    other = await state.acquire_lease("controller", "other", 2.5)
    assert other is not None and other.epoch == 2
    leading.cancel()
    await asyncio.wait([leading])


class LateRedis(ConnectionPool):
    """One lease held by another, who renews it while the first question about it waits for Redis."""

    def __init__(self, clock: FakeClock, late_s: float) -> None:
        super().__init__("redis://nowhere")
        self._clock = clock
        self._late_s = late_s
        self._beat = b"1"

    async def script(self, script: LuaScript, keys: Sequence[str], args: Sequence[Argument]) -> object:
        if self._beat == b"1":
            self._clock.advance(self._late_s)
            self._beat = b"2"
        return [b"1", 2] if args[3] == self._beat else self._beat


async def test_a_lease_is_not_taken_over_for_an_answer_that_came_late():
    clock = FakeClock()
    leases = RedisLeases(LateRedis(clock, 1.9), clock=clock)
    assert await leases.acquire_lease("controller", "b", 2.5) is None
    clock.advance(2.4)
    assert await leases.acquire_lease("controller", "b", 2.5) is None
    clock.advance(0.1)
    assert await leases.acquire_lease("controller", "b", 2.5) == Fence("1", 2)


async def test_a_node_tells_its_instances_anew_when_the_state_has_lost_them():
    state = Forgetful()
    publisher = Publisher(state, 1, 0.3, NothingDue())
    cursor = (await state.snapshot()).cursor
    running = asyncio.create_task(publisher.run(lambda: node(epoch=1)))
    publisher.instance_changed(instance("i0"))
    reported: list[InstanceRecord] = []
    async with asyncio.timeout(PATIENCE_S):
        async for _, change in state.watch(cursor):
            if isinstance(change, InstanceChanged):
                reported.append(change.record)
                if len(reported) == 2:
                    break
                state.clear_instances()
    assert reported == [instance("i0"), instance("i0")]
    assert names((await state.snapshot()).instances) == ["i0"]
    publisher.close()
    await running


def names(records: Sequence[InstanceRecord]) -> list[str]:
    return [record.instance_id for record in records]


async def test_no_lease_of_a_node_depends_on_the_time_of_day():
    clock = FakeClock()
    state = MemoryState(clock=clock)
    record: NodeRecord = node()
    await state.put_node(record, 6)
    clock.step_wall(-3600)
    assert [up.ttl_s for up in (await state.snapshot()).nodes] == [6]
    clock.step_wall(7200)
    assert [up.ttl_s for up in (await state.snapshot()).nodes] == [6]
    clock.advance(6)
    assert (await state.snapshot()).nodes == ()
