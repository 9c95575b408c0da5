"""The region protocol's frames, and their bounds (pure).

Every frame is a header of 16 bytes (kind, a zero byte, body length, id, value; big-endian), then
its body. After a DATA frame come `length` raw bytes. Every request is answered exactly once, by id,
but for WATCH: it is answered for as long as it stands.

| frame | from | value | body | answer |
|---|---|---|---|---|
| HELLO | server | longest read | the server's host | |
| READ | client | offset | length, region | DATA or ERROR |
| TAKE | client | offset | length, when it is due, region | DATA or ERROR |
| WAIT | client | offset | length, region | READY or ERROR |
| LOCATE | client | | region | LOCATION or ERROR |
| WATCH | client | bytes of a block | region | a HAVE at each change, until an ERROR |
| ASK | client (id: of its WATCH) | the question's number | | a HAVE with that number, or the WATCH's ERROR |
| TELL | client (id: of its WATCH) | | report of pulls | maybe a STEER |
| PAIR | client | | its queue pair's address | PAIRED or ERROR |
| EXPOSE | client | offset | length, region | EXPOSED or ERROR |
| LEND | client | offset | length, region | LENT or ERROR |
| MEET | client | | | MET or ERROR |
| SHOW | client | offset | length, region | SHOWN or ERROR |
| CANCEL | client | | | (what it cancels is still answered; what was granted is given back) |
| DATA | server | length | | |
| READY | server | the publication's serial number | | |
| LOCATION | server | the region's size | path of its file, or nothing | |
| PAIRED | server | | its queue pair's address, and what to read as a test |
| EXPOSED | server | | address and key of the range in the server's memory | |
| LENT | server | | handle and size of an allocation on the server's GPU, the range's offset in it | |
| MET | server | address of what to read as a test | what that gives, the NIXL agent's metadata | |
| SHOWN | server | address of the range | the NIXL agent's metadata | |
| HAVE | server | the latest question that it answers, or 0 | have-map | |
| STEER | server (id: of a WATCH) | | verdict on slow nodes | |
| ERROR | server | code | message | |
| PING, PONG | both | | | |
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rdmacast.cuda_ipc_memory import LENT_BYTES, LentMemory
from rdmacast.due import DUE_BYTES, Due
from rdmacast.errors import ProtocolError
from rdmacast.frames import (
    Ask,
    Cancel,
    Data,
    Error,
    ErrorCode,
    Expose,
    Exposed,
    Frame,
    Have,
    Hello,
    Kind,
    Lend,
    Lent,
    Locate,
    Location,
    Meet,
    Met,
    Pair,
    Paired,
    Ping,
    Pong,
    RangeRequest,
    Read,
    Ready,
    Show,
    Shown,
    Steer,
    Take,
    Tell,
    Wait,
    Watch,
)
from rdmacast.handshake import Service
from rdmacast.have_map import LEAST_MAP_BYTES, MOST_MAP_BYTES, HaveMap
from rdmacast.nixl_memory import MAX_METADATA_BYTES, NONCE_BYTES, Meeting, ShownMemory
from rdmacast.pull_report import (
    LEAST_REPORT_BYTES,
    LEAST_VERDICT_BYTES,
    MOST_REPORT_BYTES,
    MOST_VERDICT_BYTES,
    PullReport,
    Verdict,
)
from rdmacast.verbs_address import (
    ADDRESS_BYTES,
    ANSWERING_BYTES,
    MEMORY_BYTES,
    Answering,
    QueuePairAddress,
    RemoteMemory,
)

SERVICE = Service("cast", 4)
HEADER_BYTES = 16
MAX_REGION_BYTES = 128
MAX_READ_BYTES = 256 << 20
MAX_MESSAGE_BYTES = 1024
MAX_PATH_BYTES = 4096
MAX_HOST_BYTES = 255
MAX_OFFSET = 1 << 62

_HEADER = struct.Struct(">BBHIQ")
_LENGTH = struct.Struct(">Q")
_NAMES = 256  # of regions, the last ones: every read names one


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: its body may be read, then given to `decode`."""

    kind: Kind
    body_bytes: int
    id: int
    value: int


# Smallest and largest body of each kind.
_BODY_BOUNDS = {
    Kind.HELLO: (0, MAX_HOST_BYTES),
    Kind.READ: (_LENGTH.size + 1, _LENGTH.size + MAX_REGION_BYTES),
    Kind.TAKE: (_LENGTH.size + DUE_BYTES + 1, _LENGTH.size + DUE_BYTES + MAX_REGION_BYTES),
    Kind.WAIT: (_LENGTH.size + 1, _LENGTH.size + MAX_REGION_BYTES),
    Kind.LOCATE: (1, MAX_REGION_BYTES),
    Kind.CANCEL: (0, 0),
    Kind.DATA: (0, 0),
    Kind.READY: (0, 0),
    Kind.LOCATION: (0, MAX_PATH_BYTES),
    Kind.ERROR: (0, MAX_MESSAGE_BYTES),
    Kind.PING: (0, 0),
    Kind.PONG: (0, 0),
    Kind.WATCH: (1, MAX_REGION_BYTES),
    Kind.ASK: (0, 0),
    Kind.HAVE: (LEAST_MAP_BYTES, MOST_MAP_BYTES),
    Kind.PAIR: (ADDRESS_BYTES, ADDRESS_BYTES),
    Kind.PAIRED: (ANSWERING_BYTES, ANSWERING_BYTES),
    Kind.EXPOSE: (_LENGTH.size + 1, _LENGTH.size + MAX_REGION_BYTES),
    Kind.EXPOSED: (MEMORY_BYTES, MEMORY_BYTES),
    Kind.LEND: (_LENGTH.size + 1, _LENGTH.size + MAX_REGION_BYTES),
    Kind.LENT: (LENT_BYTES, LENT_BYTES),
    Kind.MEET: (0, 0),
    Kind.MET: (NONCE_BYTES + 1, NONCE_BYTES + MAX_METADATA_BYTES),
    Kind.SHOW: (_LENGTH.size + 1, _LENGTH.size + MAX_REGION_BYTES),
    Kind.SHOWN: (1, MAX_METADATA_BYTES),
    Kind.TELL: (LEAST_REPORT_BYTES, MOST_REPORT_BYTES),
    Kind.STEER: (LEAST_VERDICT_BYTES, MOST_VERDICT_BYTES),
}
# The requests for a range, which have one form.
_MAKERS: Mapping[Kind, type[RangeRequest]] = {
    Kind.READ: Read,
    Kind.WAIT: Wait,
    Kind.EXPOSE: Expose,
    Kind.LEND: Lend,
    Kind.SHOW: Show,
}
_RANGES = {make: kind for kind, make in _MAKERS.items()}
_KINDS: Mapping[int, Kind] = {kind.value: kind for kind in Kind}
MAX_BODY_BYTES = max(most for _, most in _BODY_BOUNDS.values())


def encode(frame: Frame) -> bytes:
    """The bytes of a frame (for DATA: of its header). Raises ProtocolError where it breaks a bound."""
    kind, id_, value, body = _parts(frame)
    smallest, largest = _BODY_BOUNDS[kind]
    if not smallest <= len(body) <= largest:
        raise ProtocolError(f"a {kind.name} frame cannot carry {len(body)} bytes")
    return _HEADER.pack(kind, 0, len(body), id_, value) + body


def _parts(frame: Frame) -> tuple[Kind, int, int, bytes]:
    match frame:
        case Data(id_, length):
            return Kind.DATA, id_, length, b""
        case Take(id_, region, offset, length, due):
            _check_range(offset, length)
            return Kind.TAKE, id_, offset, _LENGTH.pack(length) + due.encode() + _region_bytes(region)
        case RangeRequest(id_, region, offset, length):
            _check_range(offset, length)
            return _RANGES[type(frame)], id_, offset, _LENGTH.pack(length) + _region_bytes(region)
        case Pair(id_, address):
            return Kind.PAIR, id_, 0, address.encode()
        case Paired(id_, answering):
            return Kind.PAIRED, id_, 0, answering.encode()
        case Exposed(id_, memory):
            return Kind.EXPOSED, id_, 0, memory.encode()
        case Lent(id_, lent):
            return Kind.LENT, id_, 0, lent.encode()
        case Meet(id_):
            return Kind.MEET, id_, 0, b""
        case Met(id_, meeting):
            return Kind.MET, id_, meeting.probe.address, meeting.encode()
        case Shown(id_, shown):
            return Kind.SHOWN, id_, shown.address, shown.metadata
        case Locate(id_, region):
            return Kind.LOCATE, id_, 0, _region_bytes(region)
        case Watch(id_, region, block_bytes):
            _check_block_bytes(block_bytes)
            return Kind.WATCH, id_, block_bytes, _region_bytes(region)
        case Ask(id_, number):
            return Kind.ASK, id_, number, b""
        case Have(id_, answers, told):
            return Kind.HAVE, id_, answers, told.encode()
        case Tell(id_, report):
            return Kind.TELL, id_, 0, report.encode()
        case Steer(id_, verdict):
            return Kind.STEER, id_, 0, verdict.encode()
        case Cancel(id_):
            return Kind.CANCEL, id_, 0, b""
        case Ready(id_, serial):
            return Kind.READY, id_, serial, b""
        case Location(id_, nbytes, path):
            return Kind.LOCATION, id_, nbytes, path.encode()
        case Error(id_, code, message):
            return Kind.ERROR, id_, code, message.encode()[:MAX_MESSAGE_BYTES]
        case Hello(max_read_bytes, host):
            return Kind.HELLO, 0, max_read_bytes, host.encode()
        case Ping():
            return Kind.PING, 0, 0, b""
        case Pong():
            return Kind.PONG, 0, 0, b""


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Check a header of HEADER_BYTES. Raises ProtocolError."""
    number, reserved, body_bytes, id_, value = _HEADER.unpack(data)
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"unknown frame kind {number}")
    smallest, largest = _BODY_BOUNDS[kind]
    if reserved or not smallest <= body_bytes <= largest:
        raise ProtocolError(f"a {kind.name} frame cannot carry {body_bytes} bytes")
    if value > (MAX_READ_BYTES if kind is Kind.DATA else MAX_OFFSET):
        raise ProtocolError(f"value {value} of a {kind.name} frame is out of bounds")
    return Header(kind, body_bytes, id_, value)


def decode(header: Header, body: bytes) -> Frame:
    """The frame of a checked header and its body. Raises ProtocolError."""
    id_, value = header.id, header.value
    match header.kind:
        case Kind.DATA:
            return Data(id_, value)
        case Kind.READ | Kind.WAIT | Kind.EXPOSE | Kind.LEND | Kind.SHOW:
            (length,) = _LENGTH.unpack_from(body)
            _check_range(value, length)
            return _MAKERS[header.kind](id_, _region(body[_LENGTH.size :]), value, length)
        case Kind.TAKE:
            (length,) = _LENGTH.unpack_from(body)
            _check_range(value, length)
            due, region = body[_LENGTH.size :][:DUE_BYTES], body[_LENGTH.size + DUE_BYTES :]
            return Take(id_, _region(region), value, length, Due.decode(due))
        case Kind.PAIR:
            return Pair(id_, QueuePairAddress.decode(body))
        case Kind.PAIRED:
            return Paired(id_, Answering.decode(body))
        case Kind.EXPOSED:
            return Exposed(id_, RemoteMemory.decode(body))
        case Kind.LENT:
            return Lent(id_, LentMemory.decode(body))
        case Kind.MEET:
            return Meet(id_)
        case Kind.MET:
            return Met(id_, Meeting.decode(value, body))
        case Kind.SHOWN:
            return Shown(id_, ShownMemory(value, body))
        case Kind.LOCATE:
            return Locate(id_, _region(body))
        case Kind.WATCH:
            _check_block_bytes(value)
            return Watch(id_, _region(body), value)
        case Kind.ASK:
            return Ask(id_, value)
        case Kind.HAVE:
            return Have(id_, value, HaveMap.decode(body))
        case Kind.TELL:
            return Tell(id_, PullReport.decode(body))
        case Kind.STEER:
            return Steer(id_, Verdict.decode(body))
        case Kind.CANCEL:
            return Cancel(id_)
        case Kind.READY:
            return Ready(id_, value)
        case Kind.LOCATION:
            return Location(id_, value, _text(body))
        case Kind.ERROR:
            return Error(id_, _error_code(value), body.decode(errors="replace"))
        case Kind.HELLO:
            return Hello(value, _text(body))
        case Kind.PING:
            return Ping()
        case Kind.PONG:
            return Pong()


def _check_range(offset: int, length: int) -> None:
    if not (0 < length <= MAX_READ_BYTES and 0 <= offset <= MAX_OFFSET):
        raise ProtocolError(f"a read of {length} bytes at {offset} is out of bounds")


def _check_block_bytes(block_bytes: int) -> None:
    if not 0 < block_bytes <= MAX_OFFSET:
        raise ProtocolError(f"blocks of {block_bytes} bytes are out of bounds")


@lru_cache(_NAMES)
def _region_bytes(region: str) -> bytes:
    if not region.isascii() or not region.isprintable() or not region or len(region) > MAX_REGION_BYTES:
        raise ProtocolError(f"bad region name {region[:32]!r}: use 1 to {MAX_REGION_BYTES} printable ASCII")
    return region.encode()


@lru_cache(_NAMES)
def _region(data: bytes) -> str:
    name = data.decode("ascii", errors="replace")
    _region_bytes(name)
    return name


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a frame's text is not UTF-8") from None
    if "\0" in text:
        raise ProtocolError("a frame's text holds a zero byte")
    return text


def _error_code(value: int) -> ErrorCode:
    try:
        return ErrorCode(value)
    except ValueError:
        raise ProtocolError(f"unknown error code {value}") from None
