"""A check of the ledger while a backlog of intervals comes in: late, and so behind what was read already."""

from collections.abc import AsyncIterator

from registry.accounting.reconciliation import BalanceVerdict
from registry.accounting.usage_reader import reconcile_ledger
from registry.memory.ledger import MemoryLedger
from registry.records.usage import InstanceInterval
from tests.fixtures.usage import NOW, interval

NODES = {"late": "n1", "other": "n0"}


def chain(name: str, node: str, first: int, count: int) -> list[InstanceInterval]:
    """Idle intervals of 10 s each that follow each other."""
    return [
        interval(name, start, start + 10, node=node, earlier_us=(start - first) * 1_000_000)
        for start in range(first, first + 10 * count, 10)
    ]


class Arriving(MemoryLedger):
    """Pages of one interval, as Redis gives them: what ends before the cursor is not read any more.

    In each reading, as soon as the cursor is at the next moment of `comes_at`, two more intervals of the
    backlog come: one that ends behind the cursor, and one before it.
    """

    def __init__(self, backlog: list[InstanceInterval], comes_at: list[float]) -> None:
        super().__init__()
        self.backlog = backlog
        self.comes_at = comes_at
        self.reads = 0

    async def interval_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[InstanceInterval]]:
        self.reads += 1
        coming = bool(self.comes_at)
        cursor = (0.0, "")
        while found := sorted(
            (one for one in self._intervals.values() if (one.to_at, one.instance_id) > cursor),
            key=lambda one: (one.to_at, one.instance_id),
        ):
            yield found[:1]
            cursor = found[0].to_at, found[0].instance_id
            if coming and cursor[0] >= NOW + self.comes_at[0]:
                coming = False
                self.comes_at.pop(0)
                for one in self.backlog[:2]:
                    await self.add_interval(one)
                del self.backlog[:2]


async def test_a_backlog_that_comes_while_the_ledger_is_read_breaks_no_chain() -> None:
    late = chain("late", "n1", 0, 9)
    # In each of the first three readings two come: the cursor is between their ends.
    ledger = Arriving(late[1:], [25.0, 45.0, 65.0])
    for one in (late[0], *chain("other", "n0", 5, 10)):
        await ledger.add_interval(one)
    found = await reconcile_ledger(ledger, lambda: NODES)
    assert found.verdict is BalanceVerdict.EXACT, str(found)
    assert ledger.reads == 4 and len(ledger.backlog) == 2


async def test_a_chain_that_is_broken_is_found_in_two_readings() -> None:
    late = chain("late", "n1", 0, 9)
    ledger = Arriving([], [])
    for one in (*late[:3], *late[4:], *chain("other", "n0", 5, 10)):
        await ledger.add_interval(one)
    found = await reconcile_ledger(ledger, lambda: NODES)
    assert found.verdict is BalanceVerdict.WRONG and "instance late on n1" in str(found)
    assert ledger.reads == 2
