"""What peers say to each other, and ways to damage it."""

import random
import struct
from collections.abc import Callable
from dataclasses import replace

from rdmacast import wire
from rdmacast.cuda_ipc_memory import HANDLE_BYTES, LENT_BYTES, LentMemory
from rdmacast.due import Due
from rdmacast.have_map import MAX_BLOCKS, HaveMap
from rdmacast.nixl_memory import NONCE_BYTES as NIXL_NONCE_BYTES
from rdmacast.nixl_memory import Meeting, ShownMemory
from rdmacast.pull_report import PullReport, TimedPull, Verdict
from rdmacast.verbs_address import ADDRESS_BYTES, NONCE_BYTES, Answering, QueuePairAddress, RemoteMemory
from registry.channel_frames import Kind, pack, pack_credit, pack_failure

SECRET = b"a secret of the cluster"
CASES = 200
SEED = 20
CONTENT = bytes(range(256)) * 64
Mutation = Callable[[random.Random, list[bytes]], bytes]


# --- mutations of a conversation, given as its messages -----------------------------------------------


def flip(random_: random.Random, messages: list[bytes]) -> bytes:
    raw = bytearray(b"".join(messages))
    for _ in range(random_.randint(1, 6)):
        raw[random_.randrange(len(raw))] ^= 1 << random_.randrange(8)
    return bytes(raw)


def cut(random_: random.Random, messages: list[bytes]) -> bytes:
    raw = b"".join(messages)
    return raw[: random_.randrange(len(raw))]


def insert(random_: random.Random, messages: list[bytes]) -> bytes:
    raw = b"".join(messages)
    place = random_.randrange(len(raw))
    return raw[:place] + random_.randbytes(random_.randint(1, 64)) + raw[place:]


def noise(random_: random.Random, messages: list[bytes]) -> bytes:
    return random_.randbytes(random_.choice([1, 9, 16, 100, 5000]))


def repeat(random_: random.Random, messages: list[bytes]) -> bytes:
    """Messages twice, left out and in another order."""
    return b"".join(random_.choices(messages, k=2 * len(messages)))


def extremes(random_: random.Random, messages: list[bytes]) -> bytes:
    """A number of one message's head at its bounds."""
    messages = list(messages)
    index = random_.randrange(len(messages))
    changed = bytearray(messages[index])
    width = random_.choice([1, 2, 4, 8])
    place = random_.randrange(max(1, min(17, len(changed) - width)))
    changed[place : place + width] = random_.choice(
        [
            b"\xff" * width,
            bytes(width),
            b"\x7f" + b"\xff" * (width - 1),
            (1 << (8 * width - 1)).to_bytes(width),
        ]
    )
    messages[index] = bytes(changed)
    return b"".join(messages)


MUTATIONS: tuple[Mutation, ...] = (flip, cut, insert, noise, repeat, extremes)


def damaged(messages: list[bytes], extra: list[bytes]) -> list[bytes]:
    """CASES damaged conversations, the hand-made ones first."""
    random_ = random.Random(SEED)
    made = [MUTATIONS[case % len(MUTATIONS)](random_, messages) for case in range(CASES - len(extra))]
    return extra + made


_QUEUE_PAIR = QueuePairAddress(number=17, first_psn=5, lid=0, mtu_bytes=4096, reads=16, gid=bytes(15) + b"\1")
_LENT = LentMemory(handle=bytes(HANDLE_BYTES), allocation_bytes=1 << 20, offset=4096)
_MEETING = Meeting(ShownMemory(4096, b"[]"), bytes(NIXL_NONCE_BYTES))
_PULL = TimedPull(source=1, began_us=1000, lasted_us=2000)
VERDICT = Verdict(plan=1, slow=(3,))
REPORT = PullReport(
    cast="c",
    node=2,
    plan=0,
    slow=(3,),
    block_us=3,
    clock_us=9000,
    ended=(_PULL,) * 8,
    under_way=(_PULL,),
)
REGION_REQUESTS = [
    wire.encode(frame)
    for frame in (
        wire.Ping(),
        wire.Read(1, "image", 0, 4096),
        wire.Wait(2, "image", 256, 256),
        wire.Locate(3, "image"),
        wire.Cancel(2),
        wire.Read(4, "other", 0, 1),
        wire.Read(5, "image", 1 << 40, 1 << 20),
        wire.Take(15, "image", 256, 512, Due(mark=7, step=3, after=2)),
        wire.Watch(6, "image", 256),
        wire.Ask(6, 1),
        wire.Watch(7, "other", 256),
        wire.Ask(7, 2),
        wire.Cancel(6),
        wire.Pair(8, _QUEUE_PAIR),
        wire.Expose(9, "image", 128, 512),
        wire.Expose(10, "other", 0, 1),
        wire.Cancel(9),
        wire.Lend(11, "image", 128, 512),
        wire.Lend(12, "other", 0, 1),
        wire.Meet(13),
        wire.Show(14, "image", 128, 512),
        wire.Show(15, "other", 0, 1),
        wire.Cancel(13),
        wire.Tell(6, REPORT),
        wire.Tell(7, REPORT),
    )
]
_HEADER = struct.Struct(">BBHIQ")
HOSTILE_REQUESTS = [
    _HEADER.pack(2, 0, 9, 1, 0) + struct.pack(">Q", 1 << 60) + b"i",
    _HEADER.pack(2, 0, 13, 1, (1 << 64) - 1) + struct.pack(">Q", 1) + b"image",
    _HEADER.pack(2, 0, 65_535, 1, 0),
    _HEADER.pack(4, 0, 2, 1, 0) + b"\xff\xfe",
    _HEADER.pack(1, 0, 1, 0, 0) + b"\xff",
    _HEADER.pack(6, 0, 0, 1, 1 << 28),
    _HEADER.pack(6, 0, 0, 1, (1 << 64) - 1),
    REGION_REQUESTS[1] * 3,
    REGION_REQUESTS[2] + REGION_REQUESTS[4] * 50,
    b"".join(wire.encode(wire.Wait(id_, "image", 0, 1)) for id_ in range(6000)),
    REGION_REQUESTS[0] * 20_000,
    b"".join(wire.encode(wire.Watch(id_, "other", 256)) for id_ in range(6000)),
    wire.encode(wire.Watch(1, "image", 256)) + wire.encode(wire.Ask(1, 7)) * 20_000,
    wire.encode(wire.Watch(1, "image", 256)) * 2,
    wire.encode(wire.Ask(9, 1)) + _HEADER.pack(13, 0, 0, 1, (1 << 64) - 1),
    _HEADER.pack(12, 0, 5, 1, 0) + b"image",
    _HEADER.pack(12, 0, 5, 1, (1 << 64) - 1) + b"image",
    _HEADER.pack(12, 0, 0, 1, 256),
    _HEADER.pack(14, 0, 18, 1, 0) + HaveMap(blocks=8, epoch=0, held=1).encode(),
    wire.encode(wire.Watch(1, "image", 1 << 62)) + wire.encode(wire.Watch(2, "large", 1)),
    wire.encode(wire.Expose(1, "image", 0, 1)),
    wire.encode(wire.Pair(1, _QUEUE_PAIR)) * 3,
    wire.encode(wire.Pair(1, _QUEUE_PAIR))
    + b"".join(wire.encode(wire.Expose(id_, "image", 0, 1)) for id_ in range(2, 6000)),
    _HEADER.pack(15, 0, ADDRESS_BYTES, 1, 0) + b"\xff" * ADDRESS_BYTES,
    _HEADER.pack(15, 0, 5, 1, 0) + b"image",
    wire.encode(wire.Exposed(1, RemoteMemory(4096, 7))),
    b"".join(wire.encode(wire.Lend(id_, "image", 0, 1)) for id_ in range(6000)),
    b"".join(wire.encode(wire.Meet(id_)) for id_ in range(6000)),
    b"".join(wire.encode(wire.Show(id_, "image", 0, 1)) for id_ in range(6000)),
    _HEADER.pack(21, 0, 5, 1, 0) + b"image",
    _HEADER.pack(19, 0, 9, 1, (1 << 64) - 1) + struct.pack(">Q", 1) + b"i",
    _HEADER.pack(23, 0, 9, 1, 0) + struct.pack(">Q", 1 << 60) + b"i",
    wire.encode(wire.Lent(1, _LENT)),
    wire.encode(wire.Met(1, _MEETING)),
    wire.encode(wire.Shown(1, _MEETING.probe)),
    wire.encode(wire.Tell(1, REPORT)) * 3000,
    b"".join(wire.encode(wire.Tell(1, replace(REPORT, cast=str(cast)))) for cast in range(2000)),
    b"".join(wire.encode(wire.Tell(1, replace(REPORT, node=node, plan=node))) for node in range(3000)),
    _HEADER.pack(25, 0, 22, 1, 0) + b"\xff" * 22,
    _HEADER.pack(25, 0, 1000, 1, 0) + b"\1" * 1000,
    wire.encode(wire.Steer(1, VERDICT)),
]
REGION_REPLIES = [
    wire.encode(frame)
    for frame in (
        wire.Hello(1 << 20, "a"),
        wire.Pong(),
        wire.Data(1, 4096),
    )
] + [CONTENT[:4096]]
HOSTILE_REPLIES = [
    wire.encode(wire.Hello(1, "a")) * 2,
    wire.encode(wire.Hello(0, "a")),
    REGION_REPLIES[0] + wire.encode(wire.Data(1, 1)) + b"x",
    REGION_REPLIES[0] + wire.encode(wire.Data(9, 4096)) + CONTENT[:4096],
    REGION_REPLIES[0] + wire.encode(wire.Ready(1, 5)),
    REGION_REPLIES[0] + wire.encode(wire.Location(1, 4096, "/etc/passwd")),
    REGION_REPLIES[0] + wire.encode(wire.Exposed(1, RemoteMemory(4096, 7))),
    REGION_REPLIES[0]
    + wire.encode(wire.Paired(1, Answering(_QUEUE_PAIR, RemoteMemory(0, 0), bytes(NONCE_BYTES)))),
    REGION_REPLIES[0] + wire.encode(wire.Error(1, wire.ErrorCode.INTERNAL, "no")),
    REGION_REPLIES[0] + _HEADER.pack(9, 0, 0, 1, 77),
    REGION_REPLIES[0] + _HEADER.pack(8, 0, 2, 1, 1) + b"\0\0",
    REGION_REPLIES[0] + wire.encode(wire.Error(99, wire.ErrorCode.CANCELLED, "")),
]
LENDER_REPLIES = [
    wire.encode(frame) for frame in (wire.Hello(1 << 20, "a"), wire.Pong(), wire.Lent(1, _LENT))
]
HOSTILE_LENDER_REPLIES = [
    LENDER_REPLIES[0]
    + wire.encode(wire.Lent(1, LentMemory(handle=bytes(HANDLE_BYTES), allocation_bytes=2, offset=1))),
    LENDER_REPLIES[0] + _HEADER.pack(20, 0, LENT_BYTES, 1, 0) + b"\xff" * LENT_BYTES,
    LENDER_REPLIES[0] + _HEADER.pack(20, 0, LENT_BYTES, 1, 0) + bytes(LENT_BYTES),
    LENDER_REPLIES[0] + _HEADER.pack(20, 0, 5, 1, 0) + b"image",
    LENDER_REPLIES[0] + wire.encode(wire.Shown(1, _MEETING.probe)),
    LENDER_REPLIES[0] + wire.encode(wire.Error(1, wire.ErrorCode.NOT_SHARED, "no")),
]
AGENT_REPLIES = [
    wire.encode(frame)
    for frame in (wire.Hello(1 << 20, "a"), wire.Met(1, _MEETING), wire.Shown(2, _MEETING.probe))
]
HOSTILE_AGENT_REPLIES = [
    AGENT_REPLIES[0] + _HEADER.pack(22, 0, NIXL_NONCE_BYTES, 1, 0) + bytes(NIXL_NONCE_BYTES),
    AGENT_REPLIES[0]
    + _HEADER.pack(22, 0, NIXL_NONCE_BYTES + 1, 1, (1 << 64) - 1)
    + bytes(NIXL_NONCE_BYTES + 1),
    AGENT_REPLIES[0] + _HEADER.pack(22, 0, 65_535, 1, 0) + bytes(65_535),
    AGENT_REPLIES[0] + wire.encode(wire.Lent(1, _LENT)),
    AGENT_REPLIES[0] + wire.encode(wire.Error(1, wire.ErrorCode.NOT_SHARED, "no")),
]

_MAP = HaveMap(blocks=64, epoch=3, held=0xFF, coming=0xF00)
WATCH_REPLIES = [
    wire.encode(frame)
    for frame in (
        wire.Hello(1 << 20, "a"),
        wire.Have(1, 0, _MAP),
        wire.Steer(1, VERDICT),
        wire.Pong(),
        wire.Have(1, 7, _MAP),
        wire.Error(1, wire.ErrorCode.REGION_GONE, "gone"),
    )
]
HOSTILE_WATCH_REPLIES = [
    WATCH_REPLIES[0] * 2,
    WATCH_REPLIES[1] * 5000,
    WATCH_REPLIES[0] + wire.encode(wire.Have(2, 0, _MAP)),
    WATCH_REPLIES[0] + wire.encode(wire.Data(1, 4096)) + CONTENT[:4096],
    WATCH_REPLIES[0] + wire.encode(wire.Ready(1, 5)),
    WATCH_REPLIES[0] + _HEADER.pack(14, 0, 65_535, 1, 0) + bytes(65_535),
    WATCH_REPLIES[0] + _HEADER.pack(14, 0, 18, 1, 0) + bytes(18),
    WATCH_REPLIES[0] + _HEADER.pack(14, 0, 18, 1, 0) + struct.pack("<BxxxIQ", 1, 1 << 31, 0) + bytes(2),
    WATCH_REPLIES[0] + _HEADER.pack(14, 0, 18, 1, 0) + struct.pack("<BxxxIQ", 2, 8, 0) + bytes(2),
    WATCH_REPLIES[0] + _HEADER.pack(14, 0, 18, 1, 0) + struct.pack("<BxxxIQ", 1, 7, 0) + b"\xff\0",
    wire.encode(wire.Have(1, 0, HaveMap(blocks=MAX_BLOCKS, epoch=(1 << 64) - 1, held=(1 << MAX_BLOCKS) - 1))),
    wire.encode(wire.Error(1, wire.ErrorCode.INTERNAL, "no")),
    WATCH_REPLIES[0] + wire.encode(wire.Steer(2, VERDICT)),
    WATCH_REPLIES[0] + wire.encode(wire.Steer(1, replace(VERDICT, plan=7, slow=(0, 1, 2, 65_535)))) * 100,
    WATCH_REPLIES[0] + _HEADER.pack(26, 0, 8, 1, 0) + b"\1\0\xff\xff\1\0\0\0",
    WATCH_REPLIES[0] + wire.encode(wire.Tell(1, REPORT)),
]

# A request's MessagePack: {"type": "InvokeHandler", "request_id": …}
_BODY = b"\x84\xa4type\xadInvokeHandler\xaarequest_id\xa1r\xabinstance_id\xa1i\xa4body\xc4\x02{}"
CHANNEL_REQUESTS = [
    pack(Kind.PING, 0),
    pack(Kind.OPEN, 1, _BODY),
    pack_credit(1, 1000),
    pack(Kind.OPEN, 2, _BODY),
    pack(Kind.CANCEL, 2),
]


def opened(body: bytes) -> bytes:
    return pack(Kind.OPEN, 1, body)


HOSTILE_BODIES = [
    b"",
    b"\x91" * 100_000,
    b"\x82\xa4type\xadInvokeHandler\xa1x" + b"\x91" * 100_000,
    b"\x82\xa4type\xadInvokeHandler\xa1x" + b"\x81\xa1a" * 50_000,
    b"\x81\xa4type\xa2\xff\xff",
    b"\x82\xa4type\xadInvokeHandler\xaarequest_id\xa2\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\x82\xa4type\xadInvokeHandler\xa4body\xc6\xff\xff\xff\xff",
    b"\x82\xa4type\xadInvokeHandler\xaarequest_id\xdb\xff\xff\xff\xff",
    b"\x81\xa4type\xa7Unknown",
    b"\x82\xa4type\xacOpenPipeline\xa6stages\xdd\xff\xff\xff\xff",
    b"\x82\xa4type\xacOpenPipeline\xa6stages\xdc\xff\xff" + b"\x95\xa1n\xa1a\xa1i\x00\x01" * 65_535,
    b"\x82\xa4type\xaaLeaveCalls\xabrequest_ids\xdc\xff\xff" + b"\xa1c" * 65_535,
    b"\xc1" * 100,
]
HOSTILE_CALLS = [
    *map(opened, HOSTILE_BODIES),
    CHANNEL_REQUESTS[1] * 2,
    struct.pack(">IBI", (1 << 32) - 1, 1, 1),
    struct.pack(">IBI", 4, 6, 1) + b"\xff" * 4,
    pack_credit(1, (1 << 32) - 1) * 100,
    pack(Kind.DATA, 1, b"x"),
    pack(Kind.END, 1),
    pack_failure(1, "code", "text"),
    b"".join(pack(Kind.OPEN, id_, _BODY) for id_ in range(1, 5000)),
]
CHANNEL_REPLIES = [
    pack(Kind.PONG, 0),
    pack(Kind.DATA, 1, b"\x82\xa4type\xacHandlerChunk\xa4data\xc4\x01x"),
    pack(Kind.END, 1),
]
HOSTILE_ANSWERS = [
    *(pack(Kind.DATA, 1, body) for body in HOSTILE_BODIES),
    *(pack(Kind.ERROR, 1, body[:16_000]) for body in HOSTILE_BODIES),
    struct.pack(">IBI", (1 << 32) - 1, 2, 1),
    pack(Kind.OPEN, 1, _BODY),
    CHANNEL_REPLIES[2] * 3,
]
