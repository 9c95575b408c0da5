"""What a node tells the shared state, and in which order."""

import asyncio
from collections import deque

from invoker.publisher import DUES_AT_ONCE, Publisher
from registry.instance import InstanceRecord
from registry.memory_state import MemoryState
from registry.node import NodeRecord
from registry.usage import InstanceInterval, LostCall
from tests.patience import PATIENCE_S
from tests.registry_records import instance, node
from tests.usage_fixture import interval


class Owing:
    """So many intervals are due."""

    def __init__(self, count: int) -> None:
        self.left = deque(interval(start=float(at), end=at + 1.0) for at in range(count))
        self.none_left = asyncio.Event()

    def first_due(self) -> tuple[int, InstanceInterval | LostCall] | None:
        return (len(self.left), self.left[0]) if self.left else None

    def paid(self, due: int) -> None:
        assert due == len(self.left)
        self.left.popleft()
        if not self.left:
            self.none_left.set()


class Noting(MemoryState):
    """Notes in which order it is told; with the first interval an instance and the node change."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.publisher: Publisher | None = None

    async def add_interval(self, interval: InstanceInterval) -> bool:
        self.told.append("due")
        if self.publisher is not None:
            self.publisher.instance_changed(instance("i1"))
            self.publisher.node_changed()
            self.publisher = None
        return await super().add_interval(interval)

    async def put_node(self, record: NodeRecord, ttl_s: float) -> bool:
        self.told.append("node")
        return await super().put_node(record, ttl_s)

    async def put_instance(self, record: InstanceRecord, epoch: int) -> None:
        self.told.append(record.instance_id)
        await super().put_instance(record, epoch)


def test_news_do_not_wait_until_all_dues_are_paid() -> None:
    async def main() -> None:
        state, owing = Noting(), Owing(3 * DUES_AT_ONCE)
        publisher = state.publisher = Publisher(state, 1, 600.0, owing)
        running = asyncio.create_task(publisher.run(lambda: node(epoch=1)))
        async with asyncio.timeout(PATIENCE_S):
            await owing.none_left.wait()
            publisher.close()
            await running
        some = ["due"] * DUES_AT_ONCE
        assert state.told == ["node", *some, "node", "i1", *some, *some, "node"]

    asyncio.run(main())


def test_a_heartbeat_waits_for_one_due_at_most() -> None:
    async def main() -> None:
        state, owing = Noting(), Owing(3)
        publisher = Publisher(state, 1, 1e-9, owing)  # it is always due
        running = asyncio.create_task(publisher.run(lambda: node(epoch=1)))
        async with asyncio.timeout(PATIENCE_S):
            await owing.none_left.wait()
            publisher.close()
            await running
        assert state.told[:6] == ["node", "due"] * 3

    asyncio.run(main())
