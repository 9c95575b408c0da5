"""What a node writes to the shared state, and in which order."""

import asyncio
from collections import deque

from invoker.publisher import LEDGER_BATCH, Publisher
from registry.errors import StateUnavailable
from registry.memory.state import MemoryState
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.node import NodeRecord
from registry.records.usage import InstanceInterval, LostCall
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import instance, node
from tests.fixtures.usage import interval


class Owing:
    """So many intervals are due."""

    def __init__(self, count: int) -> None:
        self.left = deque(interval(start=float(at), end=at + 1.0) for at in range(count))
        self.none_left = asyncio.Event()

    def next_record(self) -> tuple[int, InstanceInterval | LostCall] | None:
        return (len(self.left), self.left[0]) if self.left else None

    def acknowledge(self, due: int) -> None:
        assert due == len(self.left)
        self.left.popleft()
        if not self.left:
            self.none_left.set()


class Noting(MemoryState):
    """Records the order of writes; with the first interval an instance and the node change."""

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[str] = []
        self.publisher: Publisher | None = None

    async def add_interval(self, interval: InstanceInterval) -> bool:
        self.reported.append("due")
        if self.publisher is not None:
            self.publisher.instance_changed(instance("i1"))
            self.publisher.node_changed()
            self.publisher = None
        return await super().add_interval(interval)

    async def put_node(self, record: NodeRecord, ttl_s: float) -> bool:
        self.reported.append("node")
        return await super().put_node(record, ttl_s)

    async def put_instance(self, record: InstanceRecord, epoch: int) -> None:
        self.reported.append(record.instance_id)
        await super().put_instance(record, epoch)


class Flaky(MemoryState):
    """Does not answer while it is `away`; `asked` is set by each try."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.asked = asyncio.Event()

    async def put_node(self, record: NodeRecord, ttl_s: float) -> bool:
        if self.away:
            self.asked.set()
            raise StateUnavailable("away")
        return await super().put_node(record, ttl_s)


async def test_news_do_not_wait_until_all_dues_are_paid() -> None:
    state, owing = Noting(), Owing(3 * LEDGER_BATCH)
    publisher = state.publisher = Publisher(state, 1, 600.0, owing)
    running = asyncio.create_task(publisher.run(lambda: node(epoch=1)))
    async with asyncio.timeout(PATIENCE_S):
        await owing.none_left.wait()
        publisher.close()
        await running
    some = ["due"] * LEDGER_BATCH
    assert state.reported == ["node", *some, "node", "i1", *some, *some, "node"]


async def test_a_heartbeat_waits_for_one_due_at_most() -> None:
    state, owing = Noting(), Owing(3)
    publisher = Publisher(state, 1, 1e-9, owing)  # it is always due
    running = asyncio.create_task(publisher.run(lambda: node(epoch=1)))
    async with asyncio.timeout(PATIENCE_S):
        await owing.none_left.wait()
        publisher.close()
        await running
    assert state.reported[:6] == ["node", "due"] * 3


async def test_what_changed_while_the_state_was_away_is_told_afterwards() -> None:
    state = Flaky()
    publisher = Publisher(state, 1, 6.0, Owing(0))
    running = asyncio.create_task(publisher.run(lambda: node(epoch=1)))
    async with asyncio.timeout(PATIENCE_S):
        await publisher.registered.wait()
        publisher.instance_changed(instance(state=InstanceState.STARTING))
        await _seen(state, InstanceState.STARTING)
        state.away = True
        publisher.node_changed()
        publisher.instance_changed(instance(state=InstanceState.LOADING))
        publisher.instance_changed(instance(state=InstanceState.READY))
        for _ in range(2):
            state.asked.clear()
            await state.asked.wait()
        state.away = False
        await _seen(state, InstanceState.READY)
        publisher.close()
        await running


async def _seen(state: MemoryState, wanted: InstanceState) -> None:
    """Return once the state knows the instance as `wanted`."""
    snapshot = await state.snapshot()
    if any(record.state is wanted for record in snapshot.instances):
        return
    async for _, change in state.watch(snapshot.cursor):
        record = getattr(change, "record", None)
        if isinstance(record, InstanceRecord) and record.state is wanted:
            return
