"""Running totals of instances and calls, and their journal events."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from invoker.metering.events import AccountOpened, CallUsed, IntervalDue, LostCallDue
from registry.records.usage import CallPart, InstanceInterval, LostCall

LedgerRecord = InstanceInterval | LostCall


@dataclass(slots=True, eq=False)
class MeterAccount:
    """An instance's running totals (microseconds); opaque outside of the meter."""

    number: int
    instance_id: str
    function: str
    version: int
    state: str
    starting: bool
    from_us: int
    from_at: float
    present: bool = True
    busy: int = 0
    loading: int = 0
    idle: int = 0
    base: tuple[int, int, int] = (0, 0, 0)  # busy, loading and idle at the start of the interval
    settled_us: int = 0  # used by calls that are settled
    stepping: bool = False
    step_started_us: int = 0
    step_us: int = 0  # of the current step, not attributed yet
    working: list["MeteredCall"] = field(default_factory=list)  # calls that share the accelerator now
    parts: list[CallPart] = field(default_factory=list)  # usage in this interval by settled calls
    # Unsettled calls with usage in this interval.
    using: dict[int, "MeteredCall"] = field(default_factory=dict)

    def raise_to(self, base: tuple[int, int, int]) -> None:
        """Raise the totals to at least `base`."""
        self.busy, self.loading, self.idle = map(max, (self.busy, self.loading, self.idle), base)

    def count_unattributed_as_idle(self) -> None:
        """Count busy time of this interval without known calls as idle."""
        attributed = sum(part.used_us for part in self.parts)
        attributed += sum(call.used_us - call.reported_us for call in self.using.values())
        unattributed = max(0, self.busy - self.base[0] - attributed)
        self.busy, self.idle = self.busy - unattributed, self.idle + unattributed


@dataclass(slots=True, eq=False)
class MeteredCall:
    """A call's running total; `first_us` is the time of its first use of the accelerator."""

    number: int
    call_id: str
    account: MeterAccount = field(repr=False)
    opened_us: int = 0
    used_us: int = 0
    first_us: int | None = None
    declared: bool = False  # recorded in the journal
    lost: bool = False
    reported_us: int = 0  # of `used_us`, in intervals that have ended

    def part(self, *, over: bool = False) -> CallPart:
        """Return its usage since the start of the interval."""
        return CallPart(call_id=self.call_id, from_us=self.reported_us, to_us=self.used_us, over=over)


def start_interval(account: MeterAccount, left: Iterable[CallPart]) -> None:
    """Start a new interval; the previous ones contain all usage so far but the parts `left`."""
    account.parts[:] = left
    for call in account.using.values():
        call.reported_us = call.used_us
    account.using.clear()


def split_time(total_us: int, tokens: Sequence[int]) -> list[int]:
    """Divide a step's duration by tokens, into integers that add up to it."""
    whole = sum(tokens)
    if not whole:
        return split_time(total_us, [1] * len(tokens))
    shares, before, assigned = [], 0, 0
    for count in tokens:
        before += count
        cumulative = total_us * before // whole
        shares.append(cumulative - assigned)
        assigned = cumulative
    return shares


def lost_call(node: str, epoch: int, call: MeteredCall, ended_at: float) -> LostCall:
    """Return the ledger record of a lost call; its id is deterministic."""
    return LostCall(
        id=f"{node}.{epoch}.{call.number}",
        call_id=call.call_id,
        instance_id=call.account.instance_id,
        node=node,
        function=call.account.function,
        version=call.account.version,
        used_us=call.used_us,
        ended_at=ended_at,
    )


def account_event(account: MeterAccount) -> AccountOpened:
    """Return the event with an account's full state."""
    return AccountOpened(
        account.number,
        account.instance_id,
        account.function,
        account.version,
        account.state,
        account.from_at,
        (account.busy, account.loading, account.idle + account.step_us),
        account.base,
        account.settled_us,
        account.present,
        tuple(account.parts),
    )


def call_event(call: MeteredCall) -> CallUsed:
    """Return the event with a call's full state."""
    return CallUsed(call.number, call.call_id, call.account.number, call.used_us, call.lost, call.reported_us)


def record_event(number: int, record: LedgerRecord) -> IntervalDue | LostCallDue:
    """Return the event of a record for the ledger."""
    if isinstance(record, InstanceInterval):
        return IntervalDue(number, record)
    return LostCallDue(number, record)
