"""The time that each of several users had of a resource that they share."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacast.cast.fair_share import FairShareClock


def test_alone_one_has_all_of_the_time_and_two_have_half() -> None:
    clock = FairShareClock()
    first = clock.join(10.0)
    second = clock.join(14.0)
    assert second - first == 4.0  # alone until then
    assert clock.leave(20.0) - second == 3.0  # half of 6 s
    assert clock.leave(21.0) - first == 4.0 + 3.0 + 1.0
    assert repr(clock) == "FairShareClock(0 sharing, 8 s each)"


def test_time_in_which_nobody_shares_is_nobodys() -> None:
    clock = FairShareClock()
    before = clock.join(0.0)
    clock.leave(1.0)
    after = clock.join(100.0)
    assert after - before == 1.0
    assert clock.leave(102.0) - after == 2.0


def test_when_a_share_is_reached_depends_on_how_many_there_are() -> None:
    clock = FairShareClock()
    begin = clock.join(5.0)
    assert clock.when_reached_s(begin + 2.0) == 7.0
    clock.join(6.0)
    assert clock.when_reached_s(begin + 2.0) == 8.0
    assert clock.leave(8.0) - begin == 2.0
    assert FairShareClock().when_reached_s(3.0) == 3.0  # nobody yet: as if one came at once


def test_news_that_come_late_take_nothing_back() -> None:
    clock = FairShareClock()
    begin = clock.join(5.0)
    clock.join(9.0)
    assert clock.leave(7.0) - begin == 4.0  # told after what happened at 9 s
    assert clock.leave(10.0) - begin == 5.0


# Gaps between events, and at each whether one comes or (if any is there) one goes.
events = st.lists(st.tuples(st.integers(0, 1000), st.booleans(), st.integers(0, 100)), max_size=60)


@given(events)
def test_each_has_its_nth_of_the_time_and_all_of_it_is_had(reported: list[tuple[int, bool, int]]) -> None:
    shared, now_s = FairShareClock(), 0.0
    there: dict[int, tuple[float, Fraction]] = {}  # what each had: as told, and added up exactly
    had, busy_s = Fraction(0), Fraction(0)
    clock = Fraction(0)
    for number, (gap, comes, which) in enumerate(reported):
        now_s += gap
        if there:
            clock += Fraction(gap, len(there))
            busy_s += gap
        if comes or not there:
            there[number] = shared.join(now_s), clock
        else:
            joined, joined_exactly = there.pop(sorted(there)[which % len(there)])
            assert shared.leave(now_s) - joined == pytest.approx(float(clock - joined_exactly), abs=1e-6)
            had += clock - joined_exactly
    had += sum(clock - joined_exactly for _, joined_exactly in there.values())
    assert had == busy_s


@given(events, st.floats(0.0, 100.0))
def test_who_stays_reaches_a_share_when_it_was_foretold(
    reported: list[tuple[int, bool, int]], more_s: float
) -> None:
    clock, now_s, sharing = FairShareClock(), 0.0, 0
    for gap, comes, _ in reported:
        now_s += gap
        if comes or not sharing:
            clock.join(now_s)
            sharing += 1
        else:
            clock.leave(now_s)
            sharing -= 1
    begin = clock.join(now_s)
    at_s = clock.when_reached_s(begin + more_s)
    assert at_s >= now_s
    assert clock.leave(at_s) == pytest.approx(begin + more_s, abs=1e-6)
