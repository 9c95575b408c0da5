"""Attributes each microsecond of accelerator time to exactly one kind, instance and call.

Time is busy while any instance runs work, divided equally among those instances; else loading, divided among
starting instances; else idle, divided among all; without instances it is unallocated. An engine's step is
divided among its sequences by tokens when it ends; handler calls that run concurrently share time equally.
All values are integer microseconds: nothing is lost to rounding, and allocated time is the union of the
instances' lifetimes. Each instance has all accelerators of its node: of several, each moment counts once for
each.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from invoker.metering.accounts import (
    LedgerRecord,
    MeterAccount,
    MeteredCall,
    account_event,
    call_event,
    lost_call,
    record_event,
    split_time,
    start_interval,
)
from invoker.metering.events import (
    AccountClosed,
    CallForgotten,
    CallLost,
    Event,
    IntervalCut,
    JournalFrame,
    JournalStarted,
    RecordAcked,
)
from invoker.metering.intervals import MAX_PARTS, intervals_of
from registry.records.instance import InstanceState

MAX_UNSENT = 10_000  # records kept while the ledger is unavailable
_LOADING = frozenset({InstanceState.STARTING, InstanceState.LOADING})

log = logging.getLogger("invoker.meter")


class Journal(Protocol):
    """A sink of journal frames, in order; methods do not raise."""

    def write(self, frame: JournalFrame) -> bool:
        """Append a frame; return True if a snapshot is due."""
        ...

    def rotate(self, snapshot: JournalFrame) -> None:
        """Restart the journal with a snapshot of the full state."""
        ...


class NoJournal:
    """A journal that discards frames."""

    def write(self, frame: JournalFrame) -> bool:
        return False

    def rotate(self, snapshot: JournalFrame) -> None:
        return None


class GpuMeter:
    """The accelerator meter of one node; thread-safe.

    `now_us` is monotonic; wall time is read once, so that setting the clock changes no durations. Records in
    `unsent`, of earlier processes, come first.
    """

    def __init__(
        self,
        node: str,
        epoch: int,
        now_us: Callable[[], int],
        wall_s: float,
        journal: Journal | None = None,
        unsent: Iterable[LedgerRecord] = (),
        gpu_count: int = 1,
    ) -> None:
        self._node = node
        self._epoch = epoch
        self._gpu_count = gpu_count
        self._now_us = now_us
        self._zero_us = now_us()
        self._origin_s = wall_s
        self._journal = journal or NoJournal()
        self._lock = threading.Lock()
        self._at = 0
        self._turn = 0  # rotates who gets the indivisible microseconds
        self._numbers = 0
        self._present: dict[int, MeterAccount] = {}
        self._calls: dict[int, MeteredCall] = {}
        self._unsent: dict[int, LedgerRecord] = {}
        self._busy = self._loading = self._idle = 0
        self._touched: dict[int, MeterAccount] = {}
        self._used: dict[int, MeteredCall] = {}
        self._on_record: Callable[[], None] = lambda: None
        for record in unsent:
            self._add_record(record, [])
        self._journal.rotate(self._snapshot())

    def __repr__(self) -> str:
        return f"<GpuMeter {self._node}: {list(self._present.values())!r}, {len(self._unsent)} unsent>"

    # Instances.

    def open_account(
        self, instance_id: str, function: str, version: int, state: InstanceState
    ) -> MeterAccount:
        """Open the account of an instance that is on the node from now on."""
        with self._lock:
            self._advance()
            number, from_at = self._number(), self._wall(self._at)
            account = MeterAccount(
                number, instance_id, function, version, state, state in _LOADING, self._at, from_at
            )
            self._present[account.number] = account
            self._commit([account_event(account)])
            return account

    def change_state(self, account: MeterAccount, state: InstanceState, *, final: bool = False) -> None:
        """Change an instance's state, which ends its interval; with `final` the instance has ended."""
        with self._lock:
            self._advance()
            if not account.present:
                return
            if final:
                self._end_step(account, ())
            events: list[Event] = []
            self._end_interval(account, state, events, final=final)
            account.starting = state in _LOADING
            if final:
                account.present = False
                del self._present[account.number]
                events.append(AccountClosed(account.number))
            self._commit(events)
        self._on_record()

    def end_intervals(self, older_than_us: int = 0) -> None:
        """End intervals of at least that length and start the next ones."""
        with self._lock:
            self._advance()
            events: list[Event] = []
            for account in self._present.values():
                end_us = self._settled_until(account)
                if end_us > account.from_us and end_us - account.from_us >= older_than_us:
                    self._end_interval(account, account.state, events)
            self._commit(events)
        if events:
            self._on_record()

    def tick(self) -> None:
        """Journal the time elapsed without an event."""
        with self._lock:
            self._advance()
            self._commit([])

    def totals(self) -> tuple[int, int, int]:
        """Return microseconds busy, loading and idle since the start; a step counts when it ends."""
        with self._lock:
            self._advance()
            return self._busy, self._loading, self._idle

    def longest_step_us(self) -> int:
        """Return the age of the longest running step."""
        with self._lock:
            now = self._now_us() - self._zero_us
            return max(
                (now - one.step_started_us for one in self._present.values() if one.stepping), default=0
            )

    # Calls.

    def open_call(self, account: MeterAccount, call_id: str) -> MeteredCall:
        """Open a call, until `close_calls`."""
        with self._lock:
            call = MeteredCall(self._number(), call_id, account, self._now_us() - self._zero_us)
            self._calls[call.number] = call
            return call

    def start_step(self, account: MeterAccount) -> None:
        """Start an engine's step."""
        with self._lock:
            self._advance()
            account.stepping = True
            account.step_started_us = self._at

    def end_step(self, account: MeterAccount, work: Sequence[tuple[MeteredCall, int]]) -> None:
        """End a step; its time is divided among `work`, calls with their tokens."""
        with self._lock:
            self._advance()
            self._end_step(account, work)
            self._commit([])

    def occupy(self, call: MeteredCall) -> None:
        """Start charging a call for the accelerator, shared with others."""
        with self._lock:
            self._advance()
            call.first_us = self._at if call.first_us is None else call.first_us
            call.account.working.append(call)

    def vacate(self, call: MeteredCall) -> None:
        """Stop charging a call for the accelerator."""
        with self._lock:
            self._advance()
            call.account.working.remove(call)
            self._commit([])

    def record_lost(self, calls: Iterable[MeteredCall]) -> None:
        """Add ledger records for ended calls whose gateway may not have received their usage."""
        events: list[Event] = []
        with self._lock:
            for call in calls:
                if call.lost or not call.used_us:
                    continue
                call.lost = True
                if call.declared:
                    events.append(CallLost(call.number))
                self._add_record(lost_call(self._node, self._epoch, call, self._wall(self._at)), events)
            self._commit(events)
        if events:
            self._on_record()

    def close_calls(self, calls: Iterable[MeteredCall]) -> None:
        """Close calls that are settled or recorded as lost."""
        events: list[Event] = []
        has_ended_interval = False
        with self._lock:
            for call in calls:
                if self._calls.pop(call.number, None) is None:
                    continue
                if call.used_us and not call.declared:
                    call.declared = True
                    events.append(call_event(call))
                if call.declared:
                    events.append(CallForgotten(call.number))
                if self._settle(call):
                    self._end_interval(call.account, call.account.state, events)
                    has_ended_interval = True
            if events:
                self._commit(events)
        if has_ended_interval:
            self._on_record()

    # Records for the ledger.

    def on_record(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each new record."""
        self._on_record = callback

    def next_record(self) -> tuple[int, LedgerRecord] | None:
        """Return the oldest unacknowledged record with its number, if any."""
        with self._lock:
            return next(iter(self._unsent.items()), None)

    def acknowledge(self, number: int) -> None:
        """Remove a record that the ledger has taken."""
        with self._lock:
            if self._unsent.pop(number, None) is not None:
                self._commit([RecordAcked(number)])

    @property
    def is_settled(self) -> bool:
        """Return whether there is nothing left to record in the ledger."""
        with self._lock:
            unsettled = any(call.used_us and not call.lost for call in self._calls.values())
            return not (self._present or self._unsent or unsettled)

    # Under the lock.

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _wall(self, at_us: int) -> float:
        return self._origin_s + at_us / 1e6

    def _advance(self) -> None:
        """Attribute the time since the last event."""
        now = self._now_us() - self._zero_us
        elapsed = (now - self._at) * self._gpu_count
        if elapsed <= 0:
            return
        self._at = now
        present = self._present.values()
        group = [one for one in present if one.stepping or one.working]
        if group:
            for account, us in zip(group, self._split(elapsed, len(group)), strict=True):
                self._touched[account.number] = account
                if account.stepping:
                    account.step_us += us
                    continue
                account.busy += us
                self._busy += us
                for call, part in zip(account.working, self._split(us, len(account.working)), strict=True):
                    call.used_us += part
                    self._used[call.number] = account.using[call.number] = call
            return
        group = [one for one in present if one.starting]
        if group:
            self._loading += elapsed
            for account, us in zip(group, self._split(elapsed, len(group)), strict=True):
                account.loading += us
                self._touched[account.number] = account
        elif present:
            self._idle += elapsed
            for account, us in zip(present, self._split(elapsed, len(present)), strict=True):
                account.idle += us
                self._touched[account.number] = account

    def _split(self, total: int, count: int) -> list[int]:
        """Divide into `count` equal shares; the remainder rotates."""
        if count == 1:
            return [total]
        each, extra = divmod(total, count)
        shares = [each + ((index - self._turn) % count < extra) for index in range(count)]
        self._turn = (self._turn + extra) % count
        return shares

    def _end_step(self, account: MeterAccount, work: Sequence[tuple[MeteredCall, int]]) -> None:
        total, account.step_us = account.step_us, 0
        account.stepping = False
        self._touched[account.number] = account
        if not work:
            account.idle += total
            self._idle += total
            return
        account.busy += total
        self._busy += total
        for (call, _), share in zip(work, split_time(total, [tokens for _, tokens in work]), strict=True):
            call.used_us += share
            if call.first_us is None:
                call.first_us = account.step_started_us
            if share:  # none if the instance ended during the step
                self._used[call.number] = account.using[call.number] = call

    def _settled_until(self, account: MeterAccount) -> int:
        # A step's time is attributed when it ends, so an interval ends before the current step.
        return max(account.from_us, account.step_started_us) if account.stepping else self._at

    def _settle(self, call: MeteredCall) -> bool:
        """Move a call's usage to its account; return whether the interval has reached MAX_PARTS."""
        account = call.account
        account.settled_us += call.used_us
        account.using.pop(call.number, None)
        if not (call.used_us and account.present):
            return False
        account.parts.append(call.part(over=True))
        return len(account.parts) >= MAX_PARTS and self._settled_until(account) > account.from_us

    def _end_interval(
        self, account: MeterAccount, state: str, events: list[Event], *, final: bool = False
    ) -> None:
        end_us = self._settled_until(account)
        to_at = self._wall(end_us)
        known = (self._node, self._epoch, account)
        intervals, left = intervals_of(*known, to_at=to_at, final=final, gpu_count=self._gpu_count)
        totals = account.busy, account.loading, account.idle
        start_interval(account, left)
        account.state, account.base = state, totals
        account.from_us, account.from_at = end_us, self._wall(end_us)
        events.append(IntervalCut(account.number, state, account.from_at, totals, tuple(left)))
        for interval in intervals:
            self._add_record(interval, events)

    def _add_record(self, record: LedgerRecord, events: list[Event]) -> None:
        number = self._number()
        self._unsent[number] = record
        events.append(record_event(number, record))
        if len(self._unsent) > MAX_UNSENT:
            dropped = next(iter(self._unsent))
            log.error("ledger unavailable for too long: dropped %r", self._unsent.pop(dropped))
            events.append(RecordAcked(dropped))

    def _commit(self, events: list[Event]) -> None:
        """Journal all changes."""
        used: list[int] = []
        for call in self._used.values():
            if call.declared:
                used += (call.number, call.used_us)
            elif call.number in self._calls:
                call.declared = True
                events = [call_event(call), *events]
        accounts: list[int] = []
        for account in self._touched.values():
            accounts += (account.number, account.busy, account.loading, account.idle + account.step_us)
        self._used.clear()
        self._touched.clear()
        if self._journal.write(JournalFrame(self._at, accounts, used, events)):
            self._journal.rotate(self._snapshot())

    def _snapshot(self) -> JournalFrame:
        calls = [call for call in self._calls.values() if call.declared]
        accounts = {**self._present, **{call.account.number: call.account for call in calls}}
        events: list[Event] = [JournalStarted(self._node, self._epoch, self._origin_s, self._gpu_count)]
        events += [account_event(account) for account in accounts.values()]
        events += [call_event(call) for call in calls]
        events += [record_event(number, record) for number, record in self._unsent.items()]
        return JournalFrame(self._at, [], [], events)
