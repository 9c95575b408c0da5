"""Intervals of a meter: however many calls one is to name, and however many are not settled."""

import sys
from types import FrameType
from typing import Any

import pytest

from invoker.metering.accounts import MeterAccount, MeteredCall
from invoker.metering.intervals import MAX_PARTS
from invoker.metering.meter import GpuMeter
from invoker.metering.replay import replay
from registry.accounting.reconciliation import BalanceVerdict, reconcile
from registry.records.instance import InstanceState
from registry.records.usage import GpuSlice, InstanceInterval, LostCall, RequestRecord
from tests.fixtures.meter import paid
from tests.fixtures.registry_records import request
from tests.fixtures.usage_histories import ORIGIN_S, Tape


class Node:
    """A meter with a journal, and the records of the calls that are settled."""

    def __init__(self) -> None:
        self.now_us = 0
        self.tape = Tape()
        self.meter = GpuMeter("n0", 1, lambda: self.now_us, ORIGIN_S, self.tape)
        self.records: list[RequestRecord] = []
        self.account = self.meter.open_account("i", "f", 1, InstanceState.READY)

    def step(self, account: MeterAccount, count: int, us: int) -> list[MeteredCall]:
        """As many calls share a step."""
        first = len(self.records)
        calls = [self.meter.open_call(account, f"r{first + number}/0") for number in range(count)]
        self.meter.start_step(account)
        self.now_us += us
        self.meter.end_step(account, [(call, 1) for call in calls])
        for call in calls:
            use = GpuSlice(
                call_id=call.call_id, instance_id=account.instance_id, node="n0", gpu_us=call.used_us
            )
            self.records.append(request(call.call_id.partition("/")[0], gpu=(use,)))
        return calls

    def check(self, intervals: list[InstanceInterval], lost: tuple[LostCall, ...] = ()) -> None:
        """No interval names too many, and all of them add up."""
        assert max(len(one.calls) for one in intervals) <= MAX_PARTS
        identities = {(one.instance_id, one.state, one.from_at) for one in intervals}
        assert len(identities) == len(intervals)
        found = reconcile(self.records, intervals, lost)
        assert found.verdict is BalanceVerdict.EXACT, str(found)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("us", [2 * MAX_PARTS, 3 * MAX_PARTS + 7, 1_000_003])
def test_no_interval_names_too_many_calls_however_many_are_settled_at_once(us: int, cut: bool) -> None:
    node = Node()
    node.now_us += 1000
    calls = node.step(node.account, 3 * MAX_PARTS + 7, us)
    if cut:  # then an earlier interval says what they used
        node.meter.end_intervals()
    node.meter.close_calls(calls)
    for call in node.step(node.account, 5, 50):
        node.meter.close_calls([call])
    for _ in range(3):
        node.now_us += 100
        node.meter.end_intervals()
    node.meter.change_state(node.account, InstanceState.STOPPED, final=True)
    intervals = list(paid(node.meter))
    node.check(intervals)
    overs = [part.call_id for one in intervals for part in one.calls if part.over]
    assert sorted(overs) == sorted(one.gpu[0].call_id for one in node.records if one.gpu[0].gpu_us)


def test_no_interval_names_too_many_calls_that_run() -> None:
    node = Node()
    calls = node.step(node.account, 2 * MAX_PARTS + 1, 5_000)
    node.meter.end_intervals()
    intervals = list(paid(node.meter))
    assert [len(one.calls) for one in intervals] == [334, 334, 333]
    node.meter.close_calls(calls)
    node.meter.change_state(node.account, InstanceState.STOPPED, final=True)
    node.check([*intervals, *paid(node.meter)])


@pytest.mark.parametrize("dies", ["before", "after"])
def test_what_a_journal_leaves_names_no_more_calls_in_an_interval(dies: str) -> None:
    node = Node()
    calls = node.step(node.account, 3 * MAX_PARTS, 70_000)
    if dies == "after":
        node.meter.end_intervals()
    node.meter.close_calls(calls)
    node.step(node.account, 2 * MAX_PARTS, 3_000)
    remains = replay(node.tape.data).unsent_records()
    assert remains == replay(node.tape.data).unsent_records()
    node.check(
        [one for one in remains if isinstance(one, InstanceInterval)],
        tuple(one for one in remains if isinstance(one, LostCall)),
    )


def _steps_of_cut(unsettled: int) -> int:
    """Byte codes that it takes to end the intervals of instances, two of whose calls used something."""
    node = Node()
    accounts = [node.meter.open_account(f"i{number}", "f", 1, InstanceState.READY) for number in range(8)]
    for account in accounts:
        node.step(account, unsettled // len(accounts), 1_000)
    node.meter.end_intervals()
    node.step(accounts[0], 2, 1_000)
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        node.meter.end_intervals()
    finally:
        sys.settrace(before)
    return count


def test_ending_intervals_costs_what_is_in_them_and_not_what_is_unsettled() -> None:
    assert _steps_of_cut(80) == _steps_of_cut(8_000)
