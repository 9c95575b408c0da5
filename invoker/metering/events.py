"""Journal frames: absolute totals and events, so that any prefix of a journal is a consistent state."""

import msgspec

from registry.records.usage import CallPart, InstanceInterval, LostCall


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class JournalStarted(_Event, frozen=True):
    """The first event of a journal; Unix time of meter time `at` is `origin_s + at / 1e6`."""

    node: str
    epoch: int
    origin_s: float
    gpu_count: int = 1


class AccountOpened(_Event, frozen=True):
    """An instance's totals, now and at the start of the current interval (`base`)."""

    account: int
    instance_id: str
    function: str
    version: int
    state: str
    from_at: float
    totals: tuple[int, int, int]  # busy, loading, idle
    base: tuple[int, int, int]
    settled_us: int  # used by calls that are settled
    present: bool
    parts: tuple[CallPart, ...] = ()  # usage of settled calls in the current interval


class IntervalCut(_Event, frozen=True):
    """A new interval has started; the one that ended is in one or more IntervalDue events."""

    account: int
    state: str
    from_at: float
    base: tuple[int, int, int]
    left: tuple[CallPart, ...] = ()  # usage of settled calls that is not in those


class AccountClosed(_Event, frozen=True):
    """The instance has ended; its account exists until its calls are settled."""

    account: int


class CallUsed(_Event, frozen=True):
    """A call with accelerator time."""

    call: int
    call_id: str
    account: int
    used_us: int
    lost: bool
    reported_us: int = 0  # of `used_us`, in intervals that have ended


class CallLost(_Event, frozen=True):
    """The call has a LostCallDue event, and must not be recorded again."""

    call: int


class CallForgotten(_Event, frozen=True):
    """The call is settled: its usage is in its account's `settled_us` from now on."""

    call: int


class IntervalDue(_Event, frozen=True):
    """An unsent ledger record."""

    due: int
    record: InstanceInterval


class LostCallDue(_Event, frozen=True):
    """An unsent ledger record of an interval."""

    due: int
    record: LostCall


class RecordAcked(_Event, frozen=True):
    """The ledger has acknowledged a record."""

    due: int


Event = (
    JournalStarted
    | AccountOpened
    | IntervalCut
    | AccountClosed
    | CallUsed
    | CallLost
    | CallForgotten
    | IntervalDue
    | LostCallDue
    | RecordAcked
)


class JournalFrame(msgspec.Struct, frozen=True, array_like=True):
    """Changes up to meter time `at` (microseconds): first totals, then events.

    `accounts` holds account number, busy, loading and idle, repeated; `used` holds call number and
    microseconds, repeated.
    """

    at: int
    accounts: list[int]
    used: list[int]
    events: list[Event] = []
