"""The account of one instance in the ledger: its intervals, its calls, and the verdict on both. Pure."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from registry.records.usage import CallPart, InstanceInterval

CallName = tuple[str, str]  # of a call on an instance


class BalanceVerdict(StrEnum):
    """The result of comparing metered with recorded time."""

    EXACT = "exact"
    UNPROVEN = "unproven"  # nothing differs, but part of the proof cannot be read
    OPEN = "open"  # undecided: calls are in flight, or part of their time is not written yet
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class AccountResult:
    """The verdict on an instance, with the reason."""

    verdict: BalanceVerdict
    why: str = ""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """The span `[since, until)` in Unix seconds: each interval that overlaps it is read."""

    since: float = -math.inf
    until: float = math.inf

    @property
    def whole(self) -> bool:
        return self.since == -math.inf and self.until == math.inf

    def holds(self, at: float) -> bool:
        return self.since <= at < self.until


WHOLE = TimeSpan()


@dataclass(slots=True, kw_only=True)
class NamedCall:
    """A call as the intervals of its instance name it. `over`: its node had seen its record in the ledger."""

    call_id: str
    instance_id: str
    metered_us: int
    over: bool
    recorded_us: int = 0
    lost_us: int = 0  # beyond what is recorded

    @property
    def name(self) -> CallName:
        return self.call_id, self.instance_id

    @property
    def accounted_us(self) -> int:
        return self.recorded_us + self.lost_us


@dataclass(slots=True)
class InstanceAccount:
    """The account of an instance; all amounts in microseconds.

    `span` is the span that is read. `from_start`: its first interval has been read.
    """

    node: str
    span: TimeSpan = WHOLE
    busy_us: int = 0
    used_us: int = 0  # in records
    lost_us: int = 0
    named_us: int = 0  # in records of calls that intervals name
    unnamed_us: int = 0  # lost by calls that no interval names
    intervals: int = 0
    from_start: bool = False
    cut: bool = False  # it started before the span that is read
    ended: bool = False
    fault: str = ""
    waiting: str = ""  # a call that differs between ledger and intervals, and may still be written
    _to_at: float = 0.0
    _allocated_us: int = 0  # up to `_to_at`
    _calls: dict[str, int] = field(default_factory=dict)  # not over: their last named microsecond

    def add(self, interval: InstanceInterval) -> list[NamedCall]:
        """Add the next interval; return the calls that are over with it."""
        first = not self.intervals
        self.intervals += 1
        self.busy_us += interval.busy_us
        if first:
            self._begin(interval)
        elif interval.from_at != self._to_at or interval.earlier_us != self._allocated_us:
            self.fault = "its intervals do not follow each other"
        self._to_at = interval.to_at
        self._allocated_us = interval.earlier_us + interval.allocated_us
        if sum(part.used_us for part in interval.calls) != interval.busy_us:
            self.fault = "an interval's calls are not what it was busy for"
        self.ended = self.ended or interval.final
        for part in interval.calls:
            self._add_call(part)
        return [
            NamedCall(
                call_id=part.call_id, instance_id=interval.instance_id, metered_us=part.to_us, over=True
            )
            for part in interval.calls
            if part.over
        ]

    def close(self, name: str) -> list[NamedCall]:
        """Return the calls that are not over, and drop them: no interval follows."""
        calls, self._calls = self._calls, {}
        return [
            NamedCall(call_id=call_id, instance_id=name, metered_us=metered_us, over=False)
            for call_id, metered_us in calls.items()
        ]

    def add_difference(self, call: NamedCall) -> None:
        """Record that a call's record differs from its intervals, once all lost calls are added."""
        if call.accounted_us == call.metered_us:
            return
        what = f"call {call.call_id} used {call.metered_us} us, but its record has {call.recorded_us}"
        if call.over:
            self.fault = self.fault or f"the settled {what}"
        elif self.ended and call.accounted_us > call.metered_us:
            self.fault = self.fault or f"the {what}"
        elif not self.continues or call.accounted_us < call.metered_us:
            self.waiting = "calls that ended with it are not recorded yet" if self.ended else what

    @property
    def open_calls(self) -> int:
        """The number of calls kept for the intervals that follow."""
        return len(self._calls)

    @property
    def continues(self) -> bool:
        """Whether it continues after the span that is read."""
        return not self.ended and self.intervals > 0 and self._to_at >= self.span.until

    @property
    def unwritten(self) -> bool:
        """Whether its node, or the node's journal, may hold time that is not written."""
        if self.ended or self.continues:
            return False
        return self.intervals > 0 or self.span.whole

    def result(self, *, live: bool) -> AccountResult:
        """Return the verdict, once everything is added."""
        if self.fault:
            return AccountResult(BalanceVerdict.WRONG, self.fault)
        beyond_us = self.used_us - self.named_us + self.unnamed_us
        if beyond_us and self.ended and self.from_start:
            return AccountResult(
                BalanceVerdict.WRONG, f"no interval names calls of it that used {beyond_us} us"
            )
        if live and not (self.ended or self.continues):
            return AccountResult(BalanceVerdict.OPEN if beyond_us or self.waiting else BalanceVerdict.EXACT)
        if self.unwritten:
            return AccountResult(
                BalanceVerdict.OPEN, "its node is gone and its last interval is not written yet"
            )
        if self.waiting:
            return AccountResult(BalanceVerdict.OPEN, self.waiting)
        if beyond_us:
            why = f"no interval of the requested span names calls of it that used {beyond_us} us"
            return AccountResult(BalanceVerdict.UNPROVEN, why)
        return AccountResult(BalanceVerdict.EXACT)

    def _begin(self, interval: InstanceInterval) -> None:
        self.from_start = interval.earlier_us == 0
        self.cut = interval.earlier_us > 0 and interval.from_at <= self.span.since
        if interval.earlier_us and not self.cut:
            self.fault = f"its first intervals are missing, of {interval.earlier_us} us"

    def _add_call(self, part: CallPart) -> None:
        before_us = self._calls.get(part.call_id, 0)
        if before_us != part.from_us and (self.from_start or before_us):
            self.fault = f"its intervals do not name all of the call {part.call_id}"
        if part.over:
            self._calls.pop(part.call_id, None)
        else:
            self._calls[part.call_id] = part.to_us
