"""What each of several that share something equally had of it."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacast.shares import Shares


def test_alone_one_has_all_of_the_time_and_two_have_half() -> None:
    shares = Shares()
    first = shares.entered(10.0)
    second = shares.entered(14.0)
    assert second - first == 4.0  # alone until then
    assert shares.left(20.0) - second == 3.0  # half of 6 s
    assert shares.left(21.0) - first == 4.0 + 3.0 + 1.0
    assert repr(shares) == "Shares(0 sharing, 8 s each)"


def test_time_in_which_nobody_shares_is_nobodys() -> None:
    shares = Shares()
    before = shares.entered(0.0)
    shares.left(1.0)
    after = shares.entered(100.0)
    assert after - before == 1.0
    assert shares.left(102.0) - after == 2.0


def test_when_a_share_is_reached_depends_on_how_many_there_are() -> None:
    shares = Shares()
    begin = shares.entered(5.0)
    assert shares.reached_s(begin + 2.0) == 7.0
    shares.entered(6.0)
    assert shares.reached_s(begin + 2.0) == 8.0
    assert shares.left(8.0) - begin == 2.0
    assert Shares().reached_s(3.0) == 3.0  # nobody yet: as if one came at once


def test_news_that_come_late_take_nothing_back() -> None:
    shares = Shares()
    begin = shares.entered(5.0)
    shares.entered(9.0)
    assert shares.left(7.0) - begin == 4.0  # told after what happened at 9 s
    assert shares.left(10.0) - begin == 5.0


# Gaps between events, and at each whether one comes or (if any is there) one goes.
events = st.lists(st.tuples(st.integers(0, 1000), st.booleans(), st.integers(0, 100)), max_size=60)


@given(events)
def test_each_has_its_nth_of_the_time_and_all_of_it_is_had(told: list[tuple[int, bool, int]]) -> None:
    shares, now_s = Shares(), 0.0
    there: dict[int, tuple[float, Fraction]] = {}  # what each had: as told, and added up exactly
    had, busy_s = Fraction(0), Fraction(0)
    clock = Fraction(0)
    for number, (gap, comes, which) in enumerate(told):
        now_s += gap
        if there:
            clock += Fraction(gap, len(there))
            busy_s += gap
        if comes or not there:
            there[number] = shares.entered(now_s), clock
        else:
            entered, entered_exactly = there.pop(sorted(there)[which % len(there)])
            assert shares.left(now_s) - entered == pytest.approx(float(clock - entered_exactly), abs=1e-6)
            had += clock - entered_exactly
    had += sum(clock - entered_exactly for _, entered_exactly in there.values())
    assert had == busy_s


@given(events, st.floats(0.0, 100.0))
def test_who_stays_reaches_a_share_when_it_was_foretold(
    told: list[tuple[int, bool, int]], more_s: float
) -> None:
    shares, now_s, sharing = Shares(), 0.0, 0
    for gap, comes, _ in told:
        now_s += gap
        if comes or not sharing:
            shares.entered(now_s)
            sharing += 1
        else:
            shares.left(now_s)
            sharing -= 1
    begin = shares.entered(now_s)
    at_s = shares.reached_s(begin + more_s)
    assert at_s >= now_s
    assert shares.left(at_s) == pytest.approx(begin + more_s, abs=1e-6)
