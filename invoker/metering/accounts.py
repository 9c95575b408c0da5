"""What the meter keeps of an instance and of a call, and how both are written down."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from invoker.meter_events import Called, Entered, IntervalDue, LostCallDue
from registry.usage import CallPart, InstanceInterval, LostCall

Record = InstanceInterval | LostCall


@dataclass(slots=True, eq=False)
class Account:
    """An instance as the meter sees it. The meter's own: others only hand it back."""

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
    base: tuple[int, int, int] = (0, 0, 0)  # what the three were when the interval began
    settled_us: int = 0  # what the calls used that are not known any more
    stepping: bool = False
    step_began_us: int = 0
    step_us: int = 0  # of the step under way: nobody's yet
    working: list["MeteredCall"] = field(default_factory=list)  # hold the accelerator side by side
    parts: list[CallPart] = field(default_factory=list)  # of this interval, from calls that are settled
    using: dict[int, "MeteredCall"] = field(default_factory=dict)  # not settled, used some of this interval

    def reach(self, base: tuple[int, int, int]) -> None:
        """The totals are at least those."""
        self.busy, self.loading, self.idle = map(max, (self.busy, self.loading, self.idle), base)

    def disown(self) -> None:
        """What it was busy in this interval for calls that nobody knows counts as idle."""
        named = sum(part.used_us for part in self.parts)
        named += sum(call.used_us - call.told_us for call in self.using.values())
        unnamed = max(0, self.busy - self.base[0] - named)
        self.busy, self.idle = self.busy - unnamed, self.idle + unnamed


@dataclass(slots=True, eq=False)
class MeteredCall:
    """A call's running figure. `first_us` is when it first had the accelerator."""

    number: int
    call_id: str
    account: Account = field(repr=False)
    began_us: int = 0
    used_us: int = 0
    first_us: int | None = None
    declared: bool = False  # the journal knows it
    lost: bool = False
    told_us: int = 0  # of it, in intervals that have ended

    def part(self, *, over: bool = False) -> CallPart:
        """What it used since the interval began."""
        return CallPart(call_id=self.call_id, from_us=self.told_us, to_us=self.used_us, over=over)


def tell_parts(account: Account, left: Iterable[CallPart]) -> None:
    """A new interval begins: what the account's calls used so far is in those before, which name all but
    what is `left`."""
    account.parts[:] = left
    for call in account.using.values():
        call.told_us = call.used_us
    account.using.clear()


def split_time(total_us: int, tokens: Sequence[int]) -> list[int]:
    """Share a step's time by tokens, in integers that add up to it exactly."""
    whole = sum(tokens)
    if not whole:
        return split_time(total_us, [1] * len(tokens))
    shares, before, given = [], 0, 0
    for count in tokens:
        before += count
        upto = total_us * before // whole
        shares.append(upto - given)
        given = upto
    return shares


def lost_call(node: str, epoch: int, call: MeteredCall, ended_at: float) -> LostCall:
    """The record of a call that could not be told; its id is the same however often it is made."""
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


def entered(account: Account) -> Entered:
    """The event that says all of an account."""
    return Entered(
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


def called(call: MeteredCall) -> Called:
    """The event that says all of a call."""
    return Called(call.number, call.call_id, call.account.number, call.used_us, call.lost, call.told_us)


def due(number: int, record: Record) -> IntervalDue | LostCallDue:
    """The event of a record that the ledger is to have."""
    if isinstance(record, InstanceInterval):
        return IntervalDue(number, record)
    return LostCallDue(number, record)
