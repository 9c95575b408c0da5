"""Whose the accelerator's time is: each microsecond belongs to one kind, and is shared exactly once.

At each moment the time is busy if any instance runs something, shared equally by those that do; else
loading, shared by those that start; else idle, shared by those that are there; with none there it is
not allocated. An engine's step is shared by its sequences when it ends, by the tokens that each ran in
it; calls that hold the accelerator side by side (handlers) share it equally. Integer microseconds
throughout: nothing is lost to rounding, and the union of the instances' presence is what is allocated.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from invoker.meter_accounts import (
    Account,
    MeteredCall,
    Record,
    called,
    due,
    entered,
    lost_call,
    split_time,
    tell_parts,
)
from invoker.meter_events import Began, Cut, Event, Forgotten, Frame, Left, Lost, Paid
from invoker.meter_intervals import MAX_PARTS, intervals_of
from registry.instance import InstanceState

MAX_DUE = 10_000  # records kept while the ledger does not answer
_LOADING = frozenset({InstanceState.STARTING, InstanceState.LOADING})

log = logging.getLogger("invoker.meter")


class Journal(Protocol):
    """Where frames go, in order. Neither method raises."""

    def write(self, frame: Frame) -> bool:
        """Append; True if a snapshot is wanted now."""
        ...

    def rotate(self, snapshot: Frame) -> None:
        """Begin anew with a frame that says everything."""
        ...


class NoJournal:
    """Remembers nothing."""

    def write(self, frame: Frame) -> bool:
        return False

    def rotate(self, snapshot: Frame) -> None:
        return None


class GpuMeter:
    """Safe to use from any thread; `due` is called by whoever makes a record due (the loop's thread).

    `now_us` never goes back; wall time is read once, so that a clock that is set neither makes time nor
    loses any. What `dues` brings from an earlier process comes first.
    """

    def __init__(
        self,
        node: str,
        epoch: int,
        now_us: Callable[[], int],
        wall_s: float,
        journal: Journal | None = None,
        dues: Iterable[Record] = (),
    ) -> None:
        self._node = node
        self._epoch = epoch
        self._now_us = now_us
        self._zero_us = now_us()
        self._origin_s = wall_s
        self._journal = journal or NoJournal()
        self._lock = threading.Lock()
        self._at = 0
        self._turn = 0  # whose turn it is to get the microsecond that does not divide
        self._numbers = 0
        self._present: dict[int, Account] = {}
        self._calls: dict[int, MeteredCall] = {}
        self._dues: dict[int, Record] = {}
        self._busy = self._loading = self._idle = 0
        self._touched: dict[int, Account] = {}
        self._used: dict[int, MeteredCall] = {}
        self._tell: Callable[[], None] = lambda: None
        for record in dues:
            self._owe(record, [])
        self._journal.rotate(self._snapshot())

    def __repr__(self) -> str:
        return f"<GpuMeter {self._node}: {list(self._present.values())!r}, {len(self._dues)} due>"

    # Instances.

    def enter(self, instance_id: str, function: str, version: int, state: InstanceState) -> Account:
        """An instance is there from now on."""
        with self._lock:
            self._advance()
            number, from_at = self._number(), self._wall(self._at)
            account = Account(
                number, instance_id, function, version, state, state in _LOADING, self._at, from_at
            )
            self._present[account.number] = account
            self._commit([entered(account)])
            return account

    def moved(self, account: Account, state: InstanceState, *, final: bool = False) -> None:
        """The instance goes to another state: its interval ends; with `final` the instance is gone."""
        with self._lock:
            self._advance()
            if not account.present:
                return
            if final:
                self._end_step(account, ())
            events: list[Event] = []
            self._cut(account, state, events, final=final)
            account.starting = state in _LOADING
            if final:
                account.present = False
                del self._present[account.number]
                events.append(Left(account.number))
            self._commit(events)
        self._tell()

    def cut(self, older_than_us: int = 0) -> None:
        """End the intervals that are as long as that, and begin the next ones where they end."""
        with self._lock:
            self._advance()
            events: list[Event] = []
            for account in self._present.values():
                end_us = self._settled_until(account)
                if end_us > account.from_us and end_us - account.from_us >= older_than_us:
                    self._cut(account, account.state, events)
            self._commit(events)
        if events:
            self._tell()

    def tick(self) -> None:
        """Write down what time has gone by without an event."""
        with self._lock:
            self._advance()
            self._commit([])

    def totals(self) -> tuple[int, int, int]:
        """Microseconds busy, loading and idle since the start, up to now; a step counts when it ends."""
        with self._lock:
            self._advance()
            return self._busy, self._loading, self._idle

    def longest_step_us(self) -> int:
        """How long the longest of the steps under way has been running."""
        with self._lock:
            now = self._now_us() - self._zero_us
            return max((now - one.step_began_us for one in self._present.values() if one.stepping), default=0)

    # Calls.

    def call_began(self, account: Account, call_id: str) -> MeteredCall:
        """A call is known from now on, until it is forgotten."""
        with self._lock:
            call = MeteredCall(self._number(), call_id, account, self._now_us() - self._zero_us)
            self._calls[call.number] = call
            return call

    def step_began(self, account: Account) -> None:
        """An engine has begun a step."""
        with self._lock:
            self._advance()
            account.stepping = True
            account.step_began_us = self._at

    def step_ended(self, account: Account, work: Sequence[tuple[MeteredCall, int]]) -> None:
        """The step is over: its calls, each with the tokens that it ran, share the time."""
        with self._lock:
            self._advance()
            self._end_step(account, work)
            self._commit([])

    def working(self, call: MeteredCall) -> None:
        """The call holds the accelerator from now on, beside others."""
        with self._lock:
            self._advance()
            call.first_us = self._at if call.first_us is None else call.first_us
            call.account.working.append(call)

    def rested(self, call: MeteredCall) -> None:
        """The call holds the accelerator no more."""
        with self._lock:
            self._advance()
            call.account.working.remove(call)
            self._commit([])

    def lose(self, calls: Iterable[MeteredCall]) -> None:
        """These calls have ended and their gateway may not know what they used: the ledger is to."""
        events: list[Event] = []
        with self._lock:
            for call in calls:
                if call.lost or not call.used_us:
                    continue
                call.lost = True
                if call.declared:
                    events.append(Lost(call.number))
                self._owe(lost_call(self._node, self._epoch, call, self._wall(self._at)), events)
            self._commit(events)
        if events:
            self._tell()

    def forget(self, calls: Iterable[MeteredCall]) -> None:
        """These calls are over, and in the ledger or lost."""
        events: list[Event] = []
        cut = False
        with self._lock:
            for call in calls:
                if self._calls.pop(call.number, None) is None:
                    continue
                if call.used_us and not call.declared:
                    call.declared = True
                    events.append(called(call))
                if call.declared:
                    events.append(Forgotten(call.number))
                if self._settle(call):
                    self._cut(call.account, call.account.state, events)
                    cut = True
            if events:
                self._commit(events)
        if cut:
            self._tell()

    # Records for the ledger.

    def on_due(self, tell: Callable[[], None]) -> None:
        """Have `tell` called whenever there is a new record."""
        self._tell = tell

    def first_due(self) -> tuple[int, Record] | None:
        """The oldest record that the ledger has not taken, and its number."""
        with self._lock:
            return next(iter(self._dues.items()), None)

    def paid(self, due: int) -> None:
        """The ledger has it."""
        with self._lock:
            if self._dues.pop(due, None) is not None:
                self._commit([Paid(due)])

    @property
    def at_rest(self) -> bool:
        """Whether nothing is left that the ledger should hear of."""
        with self._lock:
            unsettled = any(call.used_us and not call.lost for call in self._calls.values())
            return not (self._present or self._dues or unsettled)

    # Under the lock.

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _wall(self, at_us: int) -> float:
        return self._origin_s + at_us / 1e6

    def _advance(self) -> None:
        """Give the time since the last event to those that it belongs to."""
        now = self._now_us() - self._zero_us
        elapsed = now - self._at
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
        """`count` equal shares; who gets a microsecond more goes round."""
        if count == 1:
            return [total]
        each, extra = divmod(total, count)
        shares = [each + ((index - self._turn) % count < extra) for index in range(count)]
        self._turn = (self._turn + extra) % count
        return shares

    def _end_step(self, account: Account, work: Sequence[tuple[MeteredCall, int]]) -> None:
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
                call.first_us = account.step_began_us
            if share:  # none is left where the instance ended in the middle of the step
                self._used[call.number] = account.using[call.number] = call

    def _settled_until(self, account: Account) -> int:
        # Whose a step's time is shows at its end, so an interval ends before the step under way.
        return max(account.from_us, account.step_began_us) if account.stepping else self._at

    def _settle(self, call: MeteredCall) -> bool:
        """Count what the call used to its account; says whether the interval names enough calls."""
        account = call.account
        account.settled_us += call.used_us
        account.using.pop(call.number, None)
        if not (call.used_us and account.present):
            return False
        account.parts.append(call.part(over=True))
        return len(account.parts) >= MAX_PARTS and self._settled_until(account) > account.from_us

    def _cut(self, account: Account, state: str, events: list[Event], *, final: bool = False) -> None:
        end_us = self._settled_until(account)
        to_at = self._wall(end_us)
        intervals, left = intervals_of(self._node, self._epoch, account, to_at=to_at, final=final)
        totals = account.busy, account.loading, account.idle
        tell_parts(account, left)
        account.state, account.base = state, totals
        account.from_us, account.from_at = end_us, self._wall(end_us)
        events.append(Cut(account.number, state, account.from_at, totals, tuple(left)))
        for interval in intervals:
            self._owe(interval, events)

    def _owe(self, record: Record, events: list[Event]) -> None:
        number = self._number()
        self._dues[number] = record
        events.append(due(number, record))
        if len(self._dues) > MAX_DUE:
            dropped = next(iter(self._dues))
            log.error("the ledger has not answered for long: %r is dropped", self._dues.pop(dropped))
            events.append(Paid(dropped))

    def _commit(self, events: list[Event]) -> None:
        """Write down what has changed."""
        used: list[int] = []
        for call in self._used.values():
            if call.declared:
                used += (call.number, call.used_us)
            elif call.number in self._calls:
                call.declared = True
                events = [called(call), *events]
        accounts: list[int] = []
        for account in self._touched.values():
            accounts += (account.number, account.busy, account.loading, account.idle + account.step_us)
        self._used.clear()
        self._touched.clear()
        if self._journal.write(Frame(self._at, accounts, used, events)):
            self._journal.rotate(self._snapshot())

    def _snapshot(self) -> Frame:
        calls = [call for call in self._calls.values() if call.declared]
        accounts = {**self._present, **{call.account.number: call.account for call in calls}}
        events: list[Event] = [Began(self._node, self._epoch, self._origin_s, itemised=True)]
        events += [entered(account) for account in accounts.values()]
        events += [called(call) for call in calls]
        events += [due(number, record) for number, record in self._dues.items()]
        return Frame(self._at, [], [], events)
