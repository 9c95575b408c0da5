"""The frames of the region protocol; their form and bounds are in `wire.py` (pure)."""

from dataclasses import dataclass
from enum import IntEnum

from rdmacast.cuda_ipc_memory import LentMemory
from rdmacast.due import Due
from rdmacast.have_map import HaveMap
from rdmacast.nixl_memory import Meeting, ShownMemory
from rdmacast.pull_report import PullReport, Verdict
from rdmacast.verbs_address import Answering, QueuePairAddress, RemoteMemory


class Kind(IntEnum):
    HELLO = 1
    READ = 2
    WAIT = 3
    LOCATE = 4
    CANCEL = 5
    DATA = 6
    READY = 7
    LOCATION = 8
    ERROR = 9
    PING = 10
    PONG = 11
    WATCH = 12
    ASK = 13
    HAVE = 14
    PAIR = 15
    PAIRED = 16
    EXPOSE = 17
    EXPOSED = 18
    LEND = 19
    LENT = 20
    MEET = 21
    MET = 22
    SHOW = 23
    SHOWN = 24
    TELL = 25
    STEER = 26
    TAKE = 27


class ErrorCode(IntEnum):
    REGION_GONE = 1  # the server does not hold the region, or no longer
    BAD_RANGE = 2  # outside the region
    CANCELLED = 3  # the client asked for it
    OVERLOADED = 4  # too many requests at once
    INTERNAL = 5  # a fault in the server
    NO_RDMA = 6  # the server, or the region, cannot be read by RDMA
    NOT_SHARED = 7  # nor in another way that the client asked for


@dataclass(frozen=True, slots=True)
class Hello:
    max_read_bytes: int
    host: str


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """Asks for a range of a region; how it is to come is said by the frame's kind."""

    id: int
    region: str
    offset: int
    length: int


class Read(RangeRequest):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Take(RangeRequest):
    """A READ that is to be answered in its turn by a plan."""

    due: Due


class Wait(RangeRequest):
    __slots__ = ()


class Expose(RangeRequest):
    __slots__ = ()


class Lend(RangeRequest):
    __slots__ = ()


class Show(RangeRequest):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Locate:
    id: int
    region: str


@dataclass(frozen=True, slots=True)
class Cancel:
    id: int


@dataclass(frozen=True, slots=True)
class Data:
    id: int
    length: int


@dataclass(frozen=True, slots=True)
class Ready:
    id: int
    serial: int


@dataclass(frozen=True, slots=True)
class Location:
    id: int
    nbytes: int
    path: str


@dataclass(frozen=True, slots=True)
class Error:
    id: int
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Watch:
    id: int
    region: str
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Ask:
    id: int
    number: int


@dataclass(frozen=True, slots=True)
class Tell:
    id: int
    report: PullReport


@dataclass(frozen=True, slots=True)
class Steer:
    id: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Have:
    id: int
    answers: int
    told: HaveMap


@dataclass(frozen=True, slots=True)
class Pair:
    id: int
    address: QueuePairAddress


@dataclass(frozen=True, slots=True)
class Paired:
    id: int
    answering: Answering


@dataclass(frozen=True, slots=True)
class Exposed:
    id: int
    memory: RemoteMemory


@dataclass(frozen=True, slots=True)
class Lent:
    id: int
    memory: LentMemory


@dataclass(frozen=True, slots=True)
class Meet:
    id: int


@dataclass(frozen=True, slots=True)
class Met:
    id: int
    meeting: Meeting


@dataclass(frozen=True, slots=True)
class Shown:
    id: int
    memory: ShownMemory


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Pong:
    pass


Request = RangeRequest | Locate | Watch | Pair | Meet
Response = Data | Ready | Location | Have | Paired | Exposed | Lent | Met | Shown | Steer | Error
Frame = Hello | Request | Ask | Tell | Cancel | Response | Ping | Pong
