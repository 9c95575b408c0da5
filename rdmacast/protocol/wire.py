"""The region protocol's frames on the wire, and their bounds (pure).

Every frame is a header of 16 bytes (kind, a zero byte, body length, id, value; big-endian), then
its body. `length` raw bytes follow a DATA frame. Every request is answered exactly once, by id,
except WATCH, which is answered until it ends.

| frame | from | value | body | answer |
|---|---|---|---|---|
| GREETING | server | longest read | the server's host | |
| READ | client | offset | length, region | DATA or ERROR |
| SLOT_READ | client | offset | length, plan slot, region | DATA or ERROR |
| TRANSPORT_REQUEST | client | offset | length, kind, region, payload | TRANSPORT_REPLY or ERROR |
| WATCH | client | bytes of a block | region | a HAVE at each change, until an ERROR |
| HAVE_REQUEST | client (id: of its WATCH) | number | | a HAVE with that number, or the WATCH's ERROR |
| REPORT | client (id: of its WATCH) | | timed pulls | possibly a REPLAN |
| CANCEL | client | | | (the request is still answered; what was granted is released) |
| DATA | server | length | | |
| TRANSPORT_REPLY | server | | payload | |
| HAVE | server | the latest HAVE_REQUEST that it answers, or 0 | bitfield | |
| REPLAN | server (id: of a WATCH) | | verdict on slow nodes | |
| ERROR | server | code | message | |
| PING, PONG | both | | | |

The payloads of TRANSPORT_REQUEST and TRANSPORT_REPLY belong to the transports (`rdmacast.transports`).
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rdmacast.bitfield import MAX_BITFIELD_BYTES, MIN_BITFIELD_BYTES, Bitfield
from rdmacast.errors import ProtocolError
from rdmacast.plan_slot import SLOT_BYTES, PlanSlot
from rdmacast.protocol.frames import (
    Cancel,
    Data,
    Error,
    ErrorCode,
    Frame,
    FrameKind,
    Greeting,
    Have,
    HaveRequest,
    Ping,
    Pong,
    Read,
    Replan,
    Report,
    SlotRead,
    TransportReply,
    TransportRequest,
    Watch,
)
from rdmacast.protocol.handshake import Service
from rdmacast.protocol.pull_report import (
    MAX_REPORT_BYTES,
    MAX_VERDICT_BYTES,
    MIN_REPORT_BYTES,
    MIN_VERDICT_BYTES,
    PullReport,
    StragglerVerdict,
)

SERVICE = Service("cast", 5)
HEADER_BYTES = 16
MAX_REGION_BYTES = 128
MAX_READ_BYTES = 256 << 20
MAX_MESSAGE_BYTES = 1024
MAX_HOST_BYTES = 255
MAX_OFFSET = 1 << 62
MAX_TRANSPORT_KIND_BYTES = 16
MAX_REQUEST_PAYLOAD_BYTES = 256
MAX_REPLY_PAYLOAD_BYTES = 17 << 10  # an agent's metadata of 16 KiB, and what the transport adds to it

_HEADER = struct.Struct(">BBHIQ")
_LENGTH = struct.Struct(">Q")
_TRANSPORT = struct.Struct(">QBB")  # length of the range, of the kind, of the region's name
_CACHED_NAMES = 256  # of regions and transports: every read names one


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: its body may be read, then passed to `decode`."""

    kind: FrameKind
    body_bytes: int
    id: int
    value: int


# Smallest and largest body of each kind.
_BODY_BOUNDS = {
    FrameKind.GREETING: (0, MAX_HOST_BYTES),
    FrameKind.READ: (_LENGTH.size + 1, _LENGTH.size + MAX_REGION_BYTES),
    FrameKind.SLOT_READ: (_LENGTH.size + SLOT_BYTES + 1, _LENGTH.size + SLOT_BYTES + MAX_REGION_BYTES),
    FrameKind.TRANSPORT_REQUEST: (
        _TRANSPORT.size + 1,
        _TRANSPORT.size + MAX_TRANSPORT_KIND_BYTES + MAX_REGION_BYTES + MAX_REQUEST_PAYLOAD_BYTES,
    ),
    FrameKind.CANCEL: (0, 0),
    FrameKind.DATA: (0, 0),
    FrameKind.TRANSPORT_REPLY: (0, MAX_REPLY_PAYLOAD_BYTES),
    FrameKind.ERROR: (0, MAX_MESSAGE_BYTES),
    FrameKind.PING: (0, 0),
    FrameKind.PONG: (0, 0),
    FrameKind.WATCH: (1, MAX_REGION_BYTES),
    FrameKind.HAVE_REQUEST: (0, 0),
    FrameKind.HAVE: (MIN_BITFIELD_BYTES, MAX_BITFIELD_BYTES),
    FrameKind.REPORT: (MIN_REPORT_BYTES, MAX_REPORT_BYTES),
    FrameKind.REPLAN: (MIN_VERDICT_BYTES, MAX_VERDICT_BYTES),
}
_KINDS: Mapping[int, FrameKind] = {kind.value: kind for kind in FrameKind}
MAX_BODY_BYTES = max(largest for _, largest in _BODY_BOUNDS.values())


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame (for DATA: of its header). Raises ProtocolError where it breaks a bound."""
    kind, id_, value, body = _fields(frame)
    smallest, largest = _BODY_BOUNDS[kind]
    if not smallest <= len(body) <= largest:
        raise ProtocolError(f"a {kind.name} frame cannot carry {len(body)} bytes")
    return _HEADER.pack(kind, 0, len(body), id_, value) + body


def _fields(frame: Frame) -> tuple[FrameKind, int, int, bytes]:
    """Return kind, id, value and body of a frame."""
    match frame:
        case Data(id_, length):
            return FrameKind.DATA, id_, length, b""
        case SlotRead(id_, region, offset, length, slot):
            _check_range(offset, length)
            body = _LENGTH.pack(length) + slot.encode() + _region_bytes(region)
            return FrameKind.SLOT_READ, id_, offset, body
        case Read(id_, region, offset, length):
            _check_range(offset, length)
            return FrameKind.READ, id_, offset, _LENGTH.pack(length) + _region_bytes(region)
        case TransportRequest(id_, offset=offset):
            return FrameKind.TRANSPORT_REQUEST, id_, offset, _encode_transport(frame)
        case TransportReply(id_, payload):
            return FrameKind.TRANSPORT_REPLY, id_, 0, payload
        case Watch(id_, region, block_bytes):
            _check_block_bytes(block_bytes)
            return FrameKind.WATCH, id_, block_bytes, _region_bytes(region)
        case HaveRequest(id_, number):
            return FrameKind.HAVE_REQUEST, id_, number, b""
        case Have(id_, answers, bitfield):
            return FrameKind.HAVE, id_, answers, bitfield.encode()
        case Report(id_, report):
            return FrameKind.REPORT, id_, 0, report.encode()
        case Replan(id_, verdict):
            return FrameKind.REPLAN, id_, 0, verdict.encode()
        case Cancel(id_):
            return FrameKind.CANCEL, id_, 0, b""
        case Error(id_, code, message):
            return FrameKind.ERROR, id_, code, message.encode()[:MAX_MESSAGE_BYTES]
        case Greeting(max_read_bytes, host):
            return FrameKind.GREETING, 0, max_read_bytes, host.encode()
        case Ping():
            return FrameKind.PING, 0, 0, b""
        case Pong():
            return FrameKind.PONG, 0, 0, b""


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Check a header of HEADER_BYTES. Raises ProtocolError."""
    number, reserved, body_bytes, id_, value = _HEADER.unpack(data)
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"unknown frame kind {number}")
    smallest, largest = _BODY_BOUNDS[kind]
    if reserved or not smallest <= body_bytes <= largest:
        raise ProtocolError(f"a {kind.name} frame cannot carry {body_bytes} bytes")
    if value > (MAX_READ_BYTES if kind is FrameKind.DATA else MAX_OFFSET):
        raise ProtocolError(f"value {value} of a {kind.name} frame is out of bounds")
    return Header(kind, body_bytes, id_, value)


def decode(header: Header, body: bytes) -> Frame:
    """Return the frame of a checked header and its body. Raises ProtocolError."""
    id_, value = header.id, header.value
    match header.kind:
        case FrameKind.DATA:
            return Data(id_, value)
        case FrameKind.READ:
            (length,) = _LENGTH.unpack_from(body)
            _check_range(value, length)
            return Read(id_, _region(body[_LENGTH.size :]), value, length)
        case FrameKind.SLOT_READ:
            (length,) = _LENGTH.unpack_from(body)
            _check_range(value, length)
            slot, region = body[_LENGTH.size :][:SLOT_BYTES], body[_LENGTH.size + SLOT_BYTES :]
            return SlotRead(id_, _region(region), value, length, PlanSlot.decode(slot))
        case FrameKind.TRANSPORT_REQUEST:
            return _decode_transport(id_, value, body)
        case FrameKind.TRANSPORT_REPLY:
            return TransportReply(id_, body)
        case FrameKind.WATCH:
            _check_block_bytes(value)
            return Watch(id_, _region(body), value)
        case FrameKind.HAVE_REQUEST:
            return HaveRequest(id_, value)
        case FrameKind.HAVE:
            return Have(id_, value, Bitfield.decode(body))
        case FrameKind.REPORT:
            return Report(id_, PullReport.decode(body))
        case FrameKind.REPLAN:
            return Replan(id_, StragglerVerdict.decode(body))
        case FrameKind.CANCEL:
            return Cancel(id_)
        case FrameKind.ERROR:
            return Error(id_, _error_code(value), body.decode(errors="replace"))
        case FrameKind.GREETING:
            return Greeting(value, _text(body))
        case FrameKind.PING:
            return Ping()
        case FrameKind.PONG:
            return Pong()


def _encode_transport(request: TransportRequest) -> bytes:
    kind, region = _kind_bytes(request.kind), _optional_region(request)
    if len(request.payload) > MAX_REQUEST_PAYLOAD_BYTES:
        raise ProtocolError(f"a transport request cannot carry {len(request.payload)} bytes")
    return _TRANSPORT.pack(request.length, len(kind), len(region)) + kind + region + request.payload


def _decode_transport(id_: int, offset: int, body: bytes) -> TransportRequest:
    length, kind_bytes, region_bytes = _TRANSPORT.unpack_from(body)
    region_at = _TRANSPORT.size + kind_bytes
    payload_at = region_at + region_bytes
    if payload_at > len(body) or len(body) - payload_at > MAX_REQUEST_PAYLOAD_BYTES:
        raise ProtocolError(f"a transport request of {len(body)} bytes is malformed")
    kind, region = _kind(body[_TRANSPORT.size : region_at]), body[region_at:payload_at]
    name = _region(region) if region else ""
    request = TransportRequest(id_, kind, name, offset, length, body[payload_at:])
    _optional_region(request)
    return request


def _optional_region(request: TransportRequest) -> bytes:
    """Return the bytes of the region's name, empty for a request without range. Raises ProtocolError."""
    if request.region:
        _check_range(request.offset, request.length)
        return _region_bytes(request.region)
    if request.offset or request.length:
        raise ProtocolError("a transport request has a range but no region")
    return b""


def _check_range(offset: int, length: int) -> None:
    if not (0 < length <= MAX_READ_BYTES and 0 <= offset <= MAX_OFFSET):
        raise ProtocolError(f"a read of {length} bytes at {offset} is out of bounds")


def _check_block_bytes(block_bytes: int) -> None:
    if not 0 < block_bytes <= MAX_OFFSET:
        raise ProtocolError(f"blocks of {block_bytes} bytes are out of bounds")


def _name_bytes(name: str, what: str, most: int) -> bytes:
    if not name.isascii() or not name.isprintable() or not 1 <= len(name) <= most:
        raise ProtocolError(f"bad name {name[:32]!r} of a {what}: use 1 to {most} printable ASCII characters")
    return name.encode()


@lru_cache(_CACHED_NAMES)
def _region_bytes(region: str) -> bytes:
    return _name_bytes(region, "region", MAX_REGION_BYTES)


@lru_cache(_CACHED_NAMES)
def _region(data: bytes) -> str:
    name = data.decode("ascii", errors="replace")
    _region_bytes(name)
    return name


@lru_cache(_CACHED_NAMES)
def _kind_bytes(kind: str) -> bytes:
    return _name_bytes(kind, "transport", MAX_TRANSPORT_KIND_BYTES)


@lru_cache(_CACHED_NAMES)
def _kind(data: bytes) -> str:
    name = data.decode("ascii", errors="replace")
    _kind_bytes(name)
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
