"""One instance as the ledger tells it: its intervals, what its calls used, and the verdict on both. Pure."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from registry.usage import CallPart, InstanceInterval

CallName = tuple[str, str]  # of a call on an instance


class Verdict(StrEnum):
    EXACT = "exact"
    UNPROVEN = "unproven"  # nothing differs, but not all that would prove it can be read
    OPEN = "open"  # not to be told yet: calls are in flight, or time of theirs is not written
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """`[since, until)` in Unix seconds: each interval that overlaps it is read."""

    since: float = -math.inf
    until: float = math.inf

    @property
    def whole(self) -> bool:
        return self.since == -math.inf and self.until == math.inf

    def holds(self, at: float) -> bool:
        return self.since <= at < self.until


WHOLE = Span()


@dataclass(slots=True, kw_only=True)
class Named:
    """A call as the intervals of its instance name it. `over`: its node knew that it is in the ledger."""

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
    def told_us(self) -> int:
        return self.recorded_us + self.lost_us


@dataclass(slots=True)
class InstanceBooks:
    """What is known of an instance; all in microseconds.

    `span` is what is read of it. `itemised`: its intervals say which calls used what. `begun`: they are known
    to be there from the first.
    """

    node: str
    span: Span = WHOLE
    busy_us: int = 0
    used_us: int = 0  # what records say
    lost_us: int = 0
    named_us: int = 0  # what the records of calls that intervals name say
    unnamed_us: int = 0  # what was lost of calls that no interval names so
    intervals: int = 0
    itemised: bool = False
    begun: bool = False
    cut: bool = False  # it was there before what is read
    ended: bool = False
    fault: str = ""
    waiting: str = ""  # a call that is not in the ledger as it is in intervals, and may be yet
    _to_at: float = 0.0
    _allocated_us: int | None = None  # up to there, where intervals tell it
    _calls: dict[str, int] = field(default_factory=dict)  # not over: up to where intervals name them

    def add(self, interval: InstanceInterval) -> list[Named]:
        """Count the next interval; returns the calls that are over with it."""
        first = not self.intervals
        self.intervals += 1
        self.busy_us += interval.busy_us
        if not interval.epoch:
            return []
        self.itemised = True
        if first:
            self._begin(interval)
        elif interval.from_at != self._to_at or interval.earlier_us != self._allocated_us:
            self.fault = "its intervals do not follow each other"
        self._to_at = interval.to_at
        earlier_us = interval.earlier_us
        self._allocated_us = None if earlier_us is None else earlier_us + interval.allocated_us
        if sum(part.used_us for part in interval.calls) != interval.busy_us:
            self.fault = "an interval's calls are not what it was busy for"
        self.ended = self.ended or interval.final
        for part in interval.calls:
            self._take(part)
        return [
            Named(call_id=part.call_id, instance_id=interval.instance_id, metered_us=part.to_us, over=True)
            for part in interval.calls
            if part.over
        ]

    def leave(self, name: str) -> list[Named]:
        """The calls that are not over, for the last time: they are kept no longer."""
        calls, self._calls = self._calls, {}
        return [
            Named(call_id=call_id, instance_id=name, metered_us=metered_us, over=False)
            for call_id, metered_us in calls.items()
        ]

    def differs(self, call: Named) -> None:
        """A call whose record does not say what the intervals do, when all lost calls are known."""
        if call.told_us == call.metered_us:
            return
        what = f"call {call.call_id} used {call.metered_us} us, and its record says {call.recorded_us}"
        if call.over:
            self.fault = self.fault or f"the settled {what}"
        elif self.ended and call.told_us > call.metered_us:
            self.fault = self.fault or f"the {what}"
        elif not self.goes_on or call.told_us < call.metered_us:
            self.waiting = "calls that ended with it are not recorded yet" if self.ended else what

    @property
    def open_calls(self) -> int:
        """Calls that are kept for what follows."""
        return len(self._calls)

    @property
    def goes_on(self) -> bool:
        """Whether it is there after what is read."""
        return not self.ended and self.itemised and self._to_at >= self.span.until

    @property
    def unwritten(self) -> bool:
        """Whether its node, or the journal that it left, may hold time that is not written."""
        if self.ended or self.goes_on:
            return False
        return self.itemised or (not self.intervals and self.span.whole)

    def judged(self, *, live: bool) -> Judgement:
        """The verdict, when everything is in."""
        if self.fault:
            return Judgement(Verdict.WRONG, self.fault)
        if not self.itemised and self.intervals:
            return self._sums(live=live)
        beyond_us = self.used_us - self.named_us + self.unnamed_us
        if beyond_us and self.ended and self.begun:
            return Judgement(Verdict.WRONG, f"no interval names calls of it that used {beyond_us} us")
        if live and not (self.ended or self.goes_on):
            return Judgement(Verdict.OPEN if beyond_us or self.waiting else self._proven)
        if self.unwritten:
            return Judgement(Verdict.OPEN, "its node is gone and the last of it is not written yet")
        if self.waiting:
            return Judgement(Verdict.OPEN, self.waiting)
        if beyond_us and (self.cut or self.goes_on or not self.intervals):
            why = f"no interval at the asked times names calls of it that used {beyond_us} us"
            return Judgement(Verdict.UNPROVEN, why)
        if beyond_us or self._proven is Verdict.UNPROVEN:
            return Judgement(Verdict.UNPROVEN, "an earlier release wrote it: earlier ones may be missing")
        return Judgement(Verdict.EXACT)

    @property
    def _proven(self) -> Verdict:
        known = self.begun or self.cut or not self.intervals
        return Verdict.EXACT if known else Verdict.UNPROVEN

    def _begin(self, interval: InstanceInterval) -> None:
        self.begun = interval.earlier_us == 0
        self.cut = bool(interval.earlier_us) and interval.from_at <= self.span.since
        if interval.earlier_us and not self.cut:
            self.fault = f"its first intervals are missing, of {interval.earlier_us} us"

    def _take(self, part: CallPart) -> None:
        before_us = self._calls.get(part.call_id, 0)
        if before_us != part.from_us and (self.begun or before_us):
            self.fault = f"its intervals do not name all of the call {part.call_id}"
        if part.over:
            self._calls.pop(part.call_id, None)
        else:
            self._calls[part.call_id] = part.to_us

    def _sums(self, *, live: bool) -> Judgement:
        """Of an earlier release, whose intervals did not name calls, there are sums only."""
        if not self.span.whole:
            why = "an earlier release wrote it: only the sum of all its time can be compared"
            return Judgement(Verdict.UNPROVEN, why)
        if self.busy_us == self.used_us + self.lost_us:
            return Judgement(Verdict.UNPROVEN, "an earlier release wrote it: only its sum can be compared")
        return Judgement(Verdict.OPEN if live else Verdict.WRONG)
