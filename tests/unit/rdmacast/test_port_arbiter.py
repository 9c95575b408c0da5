"""The order in which payloads leave a port: one at a time, and none waits for a slow receiver."""

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacast.plan_slot import PlanSlot
from rdmacast.server.port_arbiter import PortArbiter
from tests.fixtures.loops import in_virtual_time
from tests.fixtures.virtual_time import run_in_virtual_time

MB = 1_000_000
MIN_HOLD_S = 0.05
FREE = "PortArbiter(free, 0 waiting)"


@dataclass(slots=True)
class Sending:
    """A payload that is to leave by a port; `began_s` and `ended_s` are of its turn."""

    name: str
    takes_s: float
    nbytes: int = MB
    rank: int = 0
    asks_s: float = 0.0
    gives_up_s: float | None = None
    began_s: float | None = None
    ended_s: float | None = None
    slot: PlanSlot | None = None

    async def by(self, arbiter: PortArbiter, order: list[str]) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.asks_s)
        try:
            async with asyncio.timeout(self.gives_up_s), arbiter.grant(self.nbytes, self.rank, self.slot):
                self.began_s = loop.time()
                order.append(self.name)
                try:
                    await asyncio.sleep(self.takes_s)
                finally:
                    self.ended_s = loop.time()
        except TimeoutError:
            pass


def sent(*sendings: Sending) -> list[str]:
    """Return the order in which payloads start at one port, which is free at the end."""

    async def main() -> list[str]:
        arbiter, order = PortArbiter(), list[str]()
        async with asyncio.TaskGroup() as group:
            for queued in sendings:
                group.create_task(queued.by(arbiter, order))
        assert repr(arbiter) == FREE
        return order

    return run_in_virtual_time(main())


def test_one_after_the_other_the_lowest_rank_first_of_equals_who_asked_first() -> None:
    quick = 0.1  # of 0.25 s that an unknown port is given for a megabyte
    first = Sending("first", quick, rank=9)
    later = [
        Sending(name, quick, rank=rank, asks_s=0.01)
        for name, rank in [("a", 3), ("b", 1), ("c", 3), ("d", 2)]
    ]
    assert sent(first, *later) == ["first", "b", "d", "a", "c"]
    begins = sorted(queued.began_s or 0.0 for queued in (first, *later))
    assert [round(after - before, 6) for before, after in pairwise(begins)] == [quick] * 4


def test_one_that_is_taken_slowly_leaves_the_port_to_the_next() -> None:
    slow, waits = Sending("slow", 100.0, nbytes=4 * MB), Sending("waits", 0.1, asks_s=0.5)
    assert sent(slow, waits) == ["slow", "waits"]
    assert slow.began_s is not None and waits.began_s == pytest.approx(slow.began_s + 2 * 4 * MB / 8e6)
    assert slow.ended_s == pytest.approx(slow.began_s + 100.0)


def test_what_is_long_is_learnt_from_the_latest_turns() -> None:
    usual = [Sending(f"usual {number}", 0.2, asks_s=number) for number in range(20)]
    slow, waits = Sending("slow", 9.0, nbytes=2 * MB, asks_s=30.0), Sending("waits", 0.1, asks_s=30.1)
    sent(*usual, slow, waits)
    assert slow.began_s is not None and waits.began_s == pytest.approx(slow.began_s + 2 * 0.4)


def test_short_ones_do_not_tell_how_long_large_ones_take() -> None:
    short = [Sending(f"short {number}", 0.0001, nbytes=1000, asks_s=number) for number in range(16)]
    slow, waits = Sending("slow", 9.0, nbytes=8 * MB, asks_s=30.0), Sending("waits", 0.1, asks_s=30.1)
    sent(*short, slow, waits)
    assert slow.began_s is not None and waits.began_s == pytest.approx(slow.began_s + 2.0)


def test_no_turn_is_long_before_the_least_time() -> None:
    quick = [Sending(f"quick {number}", 0.001, asks_s=number) for number in range(4)]
    slow, waits = Sending("slow", 9.0, asks_s=10.0), Sending("waits", 0.1, asks_s=10.001)
    sent(*quick, slow, waits)
    assert slow.began_s is not None and waits.began_s == pytest.approx(slow.began_s + MIN_HOLD_S)


def test_a_slow_one_that_ends_later_does_not_take_the_port_from_who_has_it() -> None:
    slow = Sending("slow", 0.3)  # its turn is long after 0.25 s
    second = Sending("second", 0.2, asks_s=0.1)
    third = Sending("third", 0.1, asks_s=0.1)
    assert sent(slow, second, third) == ["slow", "second", "third"]
    assert third.began_s is not None and third.began_s == second.ended_s


@in_virtual_time
async def test_a_turn_that_fails_is_over() -> None:
    arbiter = PortArbiter()
    with pytest.raises(OSError):
        async with arbiter.grant(MB):
            raise OSError("the peer is gone")
    assert repr(arbiter) == FREE
    async with arbiter.grant(MB):
        assert repr(arbiter) == "PortArbiter(taken, 0 waiting)"


@in_virtual_time
@pytest.mark.parametrize("granted", [False, True])
async def test_one_that_leaves_while_it_waits_passes_its_turn_on(granted: bool) -> None:
    arbiter, order = PortArbiter(), list[str]()
    async with asyncio.TaskGroup() as group:
        async with arbiter.grant(MB):
            leaves = group.create_task(Sending("leaves", 0.1).by(arbiter, order))
            group.create_task(Sending("stays", 0.1).by(arbiter, order))
            await asyncio.sleep(0.1)
            if not granted:
                leaves.cancel()
        leaves.cancel()  # in the turn of the loop in which it was granted, else once more
    assert order == ["stays"] and repr(arbiter) == FREE


sendings = st.lists(
    st.builds(
        Sending,
        name=st.just(""),
        takes_s=st.sampled_from([0.0, 0.01, 0.06, 0.3, 5.0]),
        nbytes=st.integers(200_000, 5 * MB),
        rank=st.integers(0, 3),
        asks_s=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        gives_up_s=st.sampled_from([None, None, 0.0, 0.05, 0.25, 1.0]),
    ),
    max_size=12,
)


@given(sendings)
def test_everybody_has_a_turn_and_two_share_only_where_one_is_slow(all_of_them: list[Sending]) -> None:
    # Anew for each run: hypothesis may give the same objects twice.
    each = [
        Sending(str(number), queued.takes_s, queued.nbytes, queued.rank, queued.asks_s, queued.gives_up_s)
        for number, queued in enumerate(all_of_them)
    ]
    order = sent(*each)
    assert len(order) == len(set(order))
    for queued in each:
        assert queued.gives_up_s is not None or (queued.began_s is not None and queued.ended_s is not None)
    began = [each[int(name)] for name in order]
    for index, queued in enumerate(began):
        for other in began[index + 1 :]:
            assert queued.began_s is not None and queued.ended_s is not None and other.began_s is not None
            assert other.began_s >= min(queued.ended_s, queued.began_s + MIN_HOLD_S) - 1e-6


def since_first(*sendings: Sending) -> list[float]:
    return [(queued.began_s or 0.0) - (sendings[0].began_s or 0.0) for queued in sendings]


def slot(step: int, after: int, mark: int = 1) -> PlanSlot:
    return PlanSlot(mark=mark, step=step, after=after)


def test_what_is_due_waits_for_what_is_due_before() -> None:
    sendings = [
        Sending("third", 0.1, slot=slot(3, 2)),  # in step 2 nothing leaves
        Sending("second", 0.1, asks_s=0.01, slot=slot(1, 1)),
        Sending("first", 0.1, asks_s=0.05, slot=slot(0, 0)),
    ]
    assert sent(*sendings) == ["first", "second", "third"]
    assert since_first(sendings[2], sendings[1], sendings[0]) == [0, pytest.approx(0.1), pytest.approx(0.2)]


def test_what_is_due_in_no_turn_and_other_plans_wait_for_nobody() -> None:
    later = Sending("later", 0.1, slot=slot(4, 4))
    others = [
        Sending("none", 0.1, rank=7, asks_s=0.01),
        Sending("other", 0.1, asks_s=0.02, slot=slot(0, 0, 2)),
    ]
    assert sent(later, *others) == ["none", "other", "later"]


def test_what_does_not_come_is_waited_for_as_long_as_a_turn_may_take_and_not_ever_again() -> None:
    late = [Sending(str(step), 0.1, slot=slot(step, step)) for step in (2, 5, 8, 11)]
    assert sent(*late) == ["2", "5", "8", "11"]
    # A turn of 0.1 s and, before the third miss, twice as long for what does not come.
    assert since_first(*late) == [0, pytest.approx(0.3), pytest.approx(0.6), pytest.approx(0.7)]


def test_what_waits_by_a_plan_is_not_overtaken_for_ever_by_what_follows_none() -> None:
    slot = PlanSlot(mark=1, step=9, after=8)  # nobody comes before it any more
    others = [Sending(f"other {number}", 0.1, asks_s=0.001 * number) for number in range(40)]
    order = sent(
        *others, Sending("due", 0.1, asks_s=0.05, slot=slot), Sending("due too", 0.1, asks_s=0.06, slot=slot)
    )
    assert order.index("due") < 8
    assert order.index("due too") < 12


def test_of_a_plan_that_is_given_up_all_are_as_others() -> None:
    slots = [PlanSlot(mark=1, step=4 * step, after=4 * step - 1) for step in range(1, 9)]
    others = [Sending(f"other {number}", 0.1, rank=1) for number in range(60)]
    by_plan = [Sending(f"due {slot.step}", 0.1, asks_s=0.05, slot=slot) for slot in slots]
    order = sent(*others, *by_plan)
    assert max(order.index(queued.name) for queued in by_plan) < 20  # three were waited for


def test_who_leaves_while_the_port_is_held_leaves_nothing() -> None:
    leaves = Sending("leaves", 0.1, slot=slot(5, 5), gives_up_s=0.1)
    assert sent(leaves, Sending("comes", 0.1, asks_s=0.5, slot=slot(0, 0))) == ["comes"]


@given(st.permutations(range(6)), st.lists(st.floats(0.0, 0.2), min_size=6, max_size=6))
def test_all_that_comes_in_time_leaves_in_the_order_of_its_steps(
    order: list[int], asks_s: list[float]
) -> None:
    sendings = [Sending(str(step), 0.1, asks_s=asks_s[step], slot=slot(step, step)) for step in order]
    assert sent(*sendings) == [str(step) for step in range(6)]
