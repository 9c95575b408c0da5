"""How long a transfer of K and V may take, and which transfers are not tried again."""

import pytest

from invoker.kv.choice import MissedDeadlines, PrefillRate
from registry.clock import FakeClock

A, B = frozenset({"a", "c"}), frozenset({"a"})


def test_prefill_is_as_fast_as_the_fastest_step() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s(40) is None
    rate.record(1, 10, 0.01)  # a token is decoded
    assert rate.tokens_per_s(40) == pytest.approx(25)
    rate.record(512, 10, 0.05)
    rate.record(1, 10, 0.02)
    rate.record(8, 10, 0.0)  # by a clock that is too coarse
    assert rate.tokens_per_s(40) == pytest.approx(2560)
    assert repr(rate) == "<PrefillRate 102400 tokens x layers / s>"


def test_hosts_are_judged_by_what_did_not_come_in_time() -> None:
    clock = FakeClock()
    missed = MissedDeadlines(clock.monotonic_s)
    missed.record(A, 0.05)  # the export may not have been finished
    clock.advance(61.0)
    missed.record(A, 0.05)
    assert not missed.covers(A, 0.05)
    clock.advance(30.0)
    missed.record(A, 0.06)
    assert missed.covers(A, 0.06) and not missed.covers(B, 0.06)
    clock.advance(60.0)
    assert not missed.covers(A, 0.06)
    for _ in range(2):
        missed.record(B, 0.05)
    missed.forget(B)
    assert not missed.covers(B, 0.05)


def test_a_longer_deadline_is_tried() -> None:
    missed = MissedDeadlines(FakeClock().monotonic_s)
    for _ in range(2):
        missed.record(A, 0.05)
    assert [missed.covers(A, deadline_s) for deadline_s in (0.04, 0.06)] == [True, False]
