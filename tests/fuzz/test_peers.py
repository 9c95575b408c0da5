"""Damaged messages of peers, over real sockets.

Each ends with a clear error and no other exception, in bounded memory, and the next good peer is served.
"""

import asyncio
import logging
import random
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from rdmacast.errors import CastError, PeerAuthError, ProtocolError
from rdmacast.fakes.cuda_ipc import MemoryIpcDriver, MemoryMachine
from rdmacast.fakes.nixl import MemoryNixl
from rdmacast.fakes.verbs import MemoryDevice, MemoryFabric
from rdmacast.protocol import wire
from rdmacast.protocol.framing import FrameAssembler
from rdmacast.protocol.handshake import ClientHandshake, Handshake, ServerHandshake, Service
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress, Transport
from rdmacast.transports.cuda_ipc.exporter import CudaIpcExporter
from rdmacast.transports.cuda_ipc.transport import CudaIpcTransport
from rdmacast.transports.nixl.exporter import NixlExporter
from rdmacast.transports.nixl.node import NixlNode
from rdmacast.transports.nixl.transport import NixlTransport
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from rdmacast.transports.verbs.exporter import VerbsExporter
from rdmacast.transports.verbs.node import VerbsNode
from registry.channel.client import Channel, ChannelServer, ChannelSettings
from registry.channel.connection import SERVICE as CHANNEL
from registry.channel.frames import ChannelFrameKind, FrameSplitter, unpack_failure
from registry.errors import ChannelError
from registry.messages.node import HandlerChunk, InvokeHandler, Reply, Request
from tests.fixtures.damaged_conversations import (
    CASES,
    CHANNEL_REPLIES,
    CHANNEL_REQUESTS,
    CONTENT,
    CUDA_IPC_REPLIES,
    HOSTILE_ANSWERS,
    HOSTILE_CALLS,
    HOSTILE_CUDA_IPC_REPLIES,
    HOSTILE_NIXL_REPLIES,
    HOSTILE_REPLIES,
    HOSTILE_REQUESTS,
    HOSTILE_SHM_REPLIES,
    NIXL_REPLIES,
    REGION_REPLIES,
    REGION_REQUESTS,
    SECRET,
    SEED,
    SHM_REPLIES,
    damaged,
)
from tests.fixtures.liar import liar
from tests.fixtures.patience import PATIENCE_S

# What a case may cost, whatever its messages claim: a stranger's, and that of a peer which knows the
# secret and has as many requests under way as it may.
OF_STRANGERS, OF_PEERS = 1 << 20, 32 << 20
LINK = LinkSettings(handshake_timeout_s=60.0)
LIMITS = ChannelSettings(handshake_timeout_s=60.0, max_frame_bytes=1 << 20)
Check = Callable[[], Awaitable[None]]


@pytest.fixture(autouse=True)
def no_surprise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer sends is an error of ours."""
    yield
    surprises = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not surprises, [record.getMessage() for record in surprises]


# --- without sockets ----------------------------------------------------------------------------------


def in_pieces(random_: random.Random, raw: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(raw):
        size = random_.choice([1, 3, 16, 1000, len(raw)])
        yield raw[start : start + size]
        start += size


def assemble(random_: random.Random, raw: bytes) -> None:
    """Feed a region server's or client's input to the code that takes frames apart."""
    assembler = FrameAssembler()
    for piece in in_pieces(random_, raw):
        rest = memoryview(piece)
        while rest:
            buffer = assembler.buffer(1 << 16)
            taken = min(len(buffer), len(rest))
            buffer[:taken] = rest[:taken]
            payload_came = assembler.in_payload
            frame = assembler.advance(taken)
            if isinstance(frame, wire.Data) and not payload_came:
                assembler.take_payload(frame, None)
            rest = rest[taken:]


def split(random_: random.Random, raw: bytes) -> None:
    splitter = FrameSplitter(LIMITS.max_frame_bytes)
    for piece in in_pieces(random_, raw):
        for kind, _, body in splitter.split(piece):
            if kind == ChannelFrameKind.ERROR:
                unpack_failure(body)


@pytest.mark.parametrize(
    ("take", "error", "conversations"),
    [
        (assemble, ProtocolError, damaged(REGION_REQUESTS, HOSTILE_REQUESTS)),
        (assemble, ProtocolError, damaged(REGION_REPLIES, HOSTILE_REPLIES)),
        (assemble, ProtocolError, damaged(CUDA_IPC_REPLIES, HOSTILE_CUDA_IPC_REPLIES)),
        (assemble, ProtocolError, damaged(NIXL_REPLIES, HOSTILE_NIXL_REPLIES)),
        (split, ChannelError, damaged(CHANNEL_REQUESTS, HOSTILE_CALLS)),
        (split, ChannelError, damaged(CHANNEL_REPLIES, HOSTILE_ANSWERS)),
    ],
    ids=[
        "region requests",
        "region replies",
        "CUDA IPC replies",
        "NIXL replies",
        "channel requests",
        "channel replies",
    ],
)
def test_frames_are_taken_apart_or_refused(
    take: Callable[[random.Random, bytes], None], error: type[Exception], conversations: list[bytes]
) -> None:
    random_ = random.Random(SEED)
    refused = 0
    for raw in conversations:
        tracemalloc.start()
        try:
            take(random_, raw)
        except error as caught:
            assert str(caught)
            refused += 1
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak <= 2 * len(raw) + (640 << 10)  # the buffer for payloads that nobody wants among it
    assert refused > CASES // 4


# --- over sockets -------------------------------------------------------------------------------------


async def shake(handshake: Handshake, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One end of a good handshake."""
    writer.write(handshake.opening)
    while handshake.needed:
        writer.write(handshake.receive(await reader.readexactly(handshake.needed)))


async def throw(port: int, raw: bytes, service: Service | None) -> None:
    """Send to a server (after a good handshake for `service`); wait until it has heard all or hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if service is not None:
            await shake(ClientHandshake(SECRET, service), reader, writer)
        writer.write(raw)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            while await reader.read(1 << 16):
                pass
    except ConnectionError:
        pass
    finally:
        writer.close()


async def bombard(port: int, conversations: list[bytes], service: Service | None, good: Check) -> None:
    """Every conversation; a good peer is served in between and at the end."""
    tracemalloc.start()
    try:
        for index, raw in enumerate(conversations):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            await throw(port, raw, service)
            _, peak = tracemalloc.get_traced_memory()
            most = 2 * len(raw) + (OF_STRANGERS if service is None else OF_PEERS)
            assert peak - before <= most, index
            if index % 20 == 0:
                await good()
        await good()
    finally:
        tracemalloc.stop()


HANDSHAKE = [ClientHandshake(SECRET, wire.SERVICE).opening, b"p" * 32]
STRANGERS = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\0" * 100_000,
    ClientHandshake(b"another secret", wire.SERVICE).opening + bytes(32),
    ClientHandshake(SECRET, Service("other", 1)).opening + bytes(32),
    ClientHandshake(SECRET, Service("cast", 200)).opening,
    HANDSHAKE[0] * 2,
    HANDSHAKE[0] + REGION_REQUESTS[1],
]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def read_region(address: PeerAddress) -> None:
    into = bytearray(len(CONTENT))
    async with TcpTransport(SECRET, settings=LINK).connect(address) as link:
        await link.read_into("image", 0, memoryview(into))
    assert into == CONTENT


@pytest.mark.parametrize("known", [False, True], ids=["handshakes", "requests"])
async def test_a_region_server_outlives_damaged_peers(known: bool) -> None:
    machine = MemoryMachine()
    with (
        VerbsNode(MemoryDevice(fabric := MemoryFabric()), "a") as verbs,
        NixlNode(agents := MemoryNixl()) as nixl,
    ):
        exporters = [VerbsExporter(verbs), NixlExporter(nixl), CudaIpcExporter(MemoryIpcDriver(machine))]
        async with RegionServer(SECRET, host="a", exporters=exporters, settings=LINK) as server:
            server.publish("image", GrowingRegion(CONTENT, complete=True))
            if known:
                conversations = damaged(REGION_REQUESTS, HOSTILE_REQUESTS)
            else:
                conversations = damaged(HANDSHAKE, STRANGERS)
            service = wire.SERVICE if known else None
            port = port_of(server.address.url)
            await bombard(port, conversations, service, lambda: read_region(server.address))
    assert not fabric.pairs and not fabric.memory and not agents.agents


async def echo(request: Request) -> AsyncIterator[Reply]:
    if isinstance(request, InvokeHandler):
        yield HandlerChunk(data=request.body)


@pytest.mark.parametrize("known", [False, True], ids=["handshakes", "calls"])
async def test_a_channel_server_outlives_damaged_peers(known: bool) -> None:
    async with ChannelServer("tcp://127.0.0.1:0", SECRET, echo, settings=LIMITS) as server:

        async def good() -> None:
            channel = await Channel.connect(server.url, SECRET, settings=LIMITS)
            asked = InvokeHandler(request_id="r", instance_id="i", body=b"{}", timeout_s=1.0)
            assert await channel.ask(asked) == HandlerChunk(data=b"{}")
            await channel.aclose()

        conversations = damaged(
            CHANNEL_REQUESTS if known else HANDSHAKE, HOSTILE_CALLS if known else STRANGERS
        )
        await bombard(port_of(server.url), conversations, CHANNEL if known else None, good)


def tcp(nixl: NixlNode) -> Transport:
    return TcpTransport(SECRET, settings=LINK)


def cuda_ipc(nixl: NixlNode) -> Transport:
    return CudaIpcTransport(SECRET, MemoryIpcDriver(MemoryMachine()), settings=LINK)


def shm(nixl: NixlNode) -> Transport:
    return ShmTransport(SECRET, settings=LINK)


def by_nixl(nixl: NixlNode) -> Transport:
    return NixlTransport(SECRET, nixl, settings=LINK)


@pytest.mark.parametrize(
    ("make", "replies"),
    [
        (tcp, damaged(REGION_REPLIES, HOSTILE_REPLIES)),
        (shm, damaged(SHM_REPLIES, HOSTILE_SHM_REPLIES)),
        (cuda_ipc, damaged(CUDA_IPC_REPLIES, HOSTILE_CUDA_IPC_REPLIES)),
        (by_nixl, damaged(NIXL_REPLIES, HOSTILE_NIXL_REPLIES)),
    ],
    ids=["tcp", "shm", "cuda_ipc", "nixl"],
)
async def test_a_client_of_regions_outlives_damaged_replies(
    make: Callable[[NixlNode], Transport], replies: list[bytes]
) -> None:
    with NixlNode(MemoryNixl()) as nixl:
        for raw in replies:
            await read_from_liar(make(nixl), raw)


async def read_from_liar(transport: Transport, raw: bytes) -> None:
    async with liar(wire.SERVICE, raw) as url:
        try:
            async with transport.connect(PeerAddress(url=url, host="a")) as link:
                await link.read_into("image", 0, memoryview(bytearray(4096)))
        except CastError as error:
            assert str(error)


async def test_a_client_of_a_channel_outlives_damaged_replies() -> None:
    for raw in damaged(CHANNEL_REPLIES, HOSTILE_ANSWERS):
        asked = InvokeHandler(request_id="r", instance_id="i", body=b"{}", timeout_s=1.0)
        async with liar(CHANNEL, raw) as url:
            try:
                channel = await Channel.connect(url, SECRET, settings=LIMITS)
                await channel.ask(asked)
                await channel.aclose()
            except ChannelError as error:
                assert str(error)


def test_damaged_handshakes_authenticate_nobody() -> None:
    """Whatever is changed in either message: no end takes the other for one that knows the secret."""
    random_ = random.Random(SEED)
    for case in range(CASES):
        client, server = ClientHandshake(SECRET, wire.SERVICE), ServerHandshake(SECRET, wire.SERVICE)
        hello = changed(random_, client.opening) if case % 3 == 0 else client.opening
        with pytest.raises((PeerAuthError, ProtocolError)) as refused:
            challenge = server.receive(hello)
            proof = client.receive(changed(random_, challenge) if case % 3 == 1 else challenge)
            server.receive(changed(random_, proof))
        assert str(refused.value)
        assert server.needed


def changed(random_: random.Random, message: bytes) -> bytes:
    """Another message of the same length."""
    raw = bytearray(message)
    raw[random_.randrange(len(raw))] ^= random_.randint(1, 255)
    return bytes(raw)
