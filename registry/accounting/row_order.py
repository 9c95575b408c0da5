"""The order of the ledger's rows of a kind, and positions in it, which outlive the row itself. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from registry.codec import encode
from registry.errors import InvalidRecord
from registry.records.usage import InstanceInterval, LostCall, RequestRecord

Row: TypeAlias = RequestRecord | InstanceInterval | LostCall


class LedgerKind(StrEnum):
    """A kind of rows."""

    REQUESTS = "requests"
    INTERVALS = "intervals"
    LOST = "lost"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of a row: its end, then its member of the index (unique; ordered as UTF-8 bytes).

    Without a member it is before all rows that end then.
    """

    at: float
    member: str = ""

    @property
    def cursor(self) -> str:
        return f"{self.at!r} {self.member}"


START = Position(float("-inf"))


def interval_identity(interval: InstanceInterval) -> bytes:
    """Return the identity of an interval."""
    # A whole number of seconds may be an int, which is encoded differently.
    return encode((interval.instance_id, interval.state, float(interval.from_at)))


def position_of(row: Row) -> Position:
    """Return the position of a row."""
    match row:
        case RequestRecord():
            return Position(float(row.ended_at), row.request_id)
        case InstanceInterval():
            return Position(float(row.to_at), interval_identity(row).decode())
        case LostCall():
            return Position(float(row.ended_at), row.id)


def position_at(cursor: str, since: float | None) -> Position:
    """Return the position after which a page starts. Raises InvalidRecord for text that is no cursor."""
    if not cursor:
        return START if since is None else Position(float(since))
    at, separator, member = cursor.partition(" ")
    try:
        position = Position(float(at), member)
    except ValueError:
        separator = ""
    if not separator:
        raise InvalidRecord(f"unknown cursor {cursor!r}")
    return position


def merged(first: list[Row], second: list[Row]) -> list[Row]:
    """Return the rows of both in order; of a row that both have, the one of `first`."""
    if not (first and second):
        return first or second
    by_position = {position_of(row): row for row in (*second, *first)}
    return [by_position[position] for position in sorted(by_position)]
