"""The frames of the region protocol; `wire` holds their format and bounds (pure)."""

from dataclasses import dataclass
from enum import IntEnum

from rdmacast.bitfield import Bitfield
from rdmacast.plan_slot import PlanSlot
from rdmacast.protocol.pull_report import PullReport, StragglerVerdict


class FrameKind(IntEnum):
    """The first byte of a frame."""

    GREETING = 1
    READ = 2
    SLOT_READ = 3
    TRANSPORT_REQUEST = 4
    CANCEL = 5
    DATA = 6
    TRANSPORT_REPLY = 7
    ERROR = 8
    PING = 9
    PONG = 10
    WATCH = 11
    HAVE_REQUEST = 12
    HAVE = 13
    REPORT = 14
    REPLAN = 15


class ErrorCode(IntEnum):
    """Why a request failed."""

    REGION_GONE = 1  # the server does not hold the region, or no longer
    BAD_REQUEST = 2  # outside the region, or malformed
    CANCELLED = 3  # by the client
    OVERLOADED = 4  # too many requests at once
    INTERNAL = 5  # a fault in the server
    NOT_SHARED = 6  # the region cannot be read by the requested transport


@dataclass(frozen=True, slots=True)
class Greeting:
    """The server's first frame."""

    max_read_bytes: int
    host: str


@dataclass(frozen=True, slots=True)
class Read:
    """A request for `[offset, offset + length)` of a region, sent as the payload of a DATA frame."""

    id: int
    region: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotRead(Read):
    """A READ that is served in its slot of a plan."""

    slot: PlanSlot


@dataclass(frozen=True, slots=True)
class TransportRequest:
    """A request to the exporter of the transport `kind`, with a payload that only the transport decodes.

    With a region and a range it exports memory; without (an empty region, length 0) it connects two ends.
    """

    id: int
    kind: str
    region: str = ""
    offset: int = 0
    length: int = 0
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The end of a request; what a TRANSPORT_REPLY granted is released."""

    id: int


@dataclass(frozen=True, slots=True)
class Data:
    """A header that `length` raw bytes follow."""

    id: int
    length: int


@dataclass(frozen=True, slots=True)
class TransportReply:
    """An exporter's reply; what it grants is valid until the client's CANCEL."""

    id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Error:
    """The failure of a request."""

    id: int
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Watch:
    """A subscription to the bitfield of a region, in blocks of `block_bytes`."""

    id: int
    region: str
    block_bytes: int


@dataclass(frozen=True, slots=True)
class HaveRequest:
    """A request for the current bitfield of the WATCH `id`; of several only the latest number is answered."""

    id: int
    number: int


@dataclass(frozen=True, slots=True)
class Have:
    """A bitfield; `answers` is the number of the latest HAVE_REQUEST that it answers, or 0."""

    id: int
    answers: int
    bitfield: Bitfield


@dataclass(frozen=True, slots=True)
class Report:
    """A node's timed pulls, for the straggler detector behind the WATCH `id`."""

    id: int
    report: PullReport


@dataclass(frozen=True, slots=True)
class Replan:
    """A new verdict on slow nodes, which makes the nodes plan again."""

    id: int
    verdict: StragglerVerdict


@dataclass(frozen=True, slots=True)
class Ping:
    """A request for a PONG."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The reply to a PING."""


Request = Read | TransportRequest | Watch
Response = Data | TransportReply | Have | Replan | Error
Frame = Greeting | Request | HaveRequest | Report | Cancel | Response | Ping | Pong
