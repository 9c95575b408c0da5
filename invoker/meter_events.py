"""What the meter writes down: frames of absolute totals, so that any prefix of them is a whole state."""

import msgspec

from registry.usage import CallPart, InstanceInterval, LostCall


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Began(_Event, frozen=True):
    """First of a journal. Unix time of a meter's moment `at` is `origin_s + at / 1e6`. `itemised`: it
    says which calls used what in the interval that an account is in (earlier releases did not)."""

    node: str
    epoch: int
    origin_s: float
    itemised: bool = False


class Entered(_Event, frozen=True):
    """An account: an instance's totals, and those at the beginning of the interval it is in."""

    account: int
    instance_id: str
    function: str
    version: int
    state: str
    from_at: float
    totals: tuple[int, int, int]  # busy, loading, idle
    base: tuple[int, int, int]
    settled_us: int  # what the calls used that are not known any more
    present: bool
    parts: tuple[CallPart, ...] = ()  # of the interval that it is in, those of such calls


class Cut(_Event, frozen=True):
    """A new interval begins; the one that ended is a due, or several."""

    account: int
    state: str
    from_at: float
    base: tuple[int, int, int]
    left: tuple[CallPart, ...] = ()  # settled calls that it did not name


class Left(_Event, frozen=True):
    """The instance is gone; its account lasts as long as its calls."""

    account: int


class Called(_Event, frozen=True):
    """A call that has used something."""

    call: int
    call_id: str
    account: int
    used_us: int
    lost: bool
    told_us: int = 0  # of it, in intervals that have ended


class Lost(_Event, frozen=True):
    """The call has become a due: it is not written to the ledger a second time."""

    call: int


class Forgotten(_Event, frozen=True):
    """The call is settled: what it used is in its account's `settled_us` from here on."""

    call: int


class IntervalDue(_Event, frozen=True):
    """A record that the ledger has not taken yet."""

    due: int
    record: InstanceInterval


class LostCallDue(_Event, frozen=True):
    """A record that the ledger has not taken yet."""

    due: int
    record: LostCall


class Paid(_Event, frozen=True):
    """The ledger has taken a due."""

    due: int


Event = Began | Entered | Cut | Left | Called | Lost | Forgotten | IntervalDue | LostCallDue | Paid


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Changes up to the moment `at` (microseconds of the meter): first the totals, then the events.

    `accounts` are numbers of known accounts, each with busy, loading and idle; `used` are numbers of
    known calls, each with its microseconds.
    """

    at: int
    accounts: list[int]
    used: list[int]
    events: list[Event] = []
