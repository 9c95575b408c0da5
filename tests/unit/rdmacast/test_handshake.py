"""The handshake: who knows the secret gets in, nobody else does, and nothing can be played back."""

import asyncio
import logging
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacast.address import parse_url
from rdmacast.errors import CastError, LinkClosed, PeerAuthError, ProtocolError
from rdmacast.protocol.connection import ConnectionListener, dial, listen
from rdmacast.protocol.handshake import ClientHandshake, ServerHandshake, Service
from tests.fixtures.patience import PATIENCE_S

SECRET = b"a secret of the cluster"
SERVICE = Service("test", 3)


def test_both_ends_authenticate() -> None:
    client, server = ClientHandshake(SECRET, SERVICE), ServerHandshake(SECRET, SERVICE)
    challenge = server.receive(client.opening)
    assert server.receive(client.receive(challenge)) == b""
    assert client.needed == server.needed == 0
    assert repr(client) == "ClientHandshake(test, done)"


def test_a_wrong_secret_is_refused_by_both_ends() -> None:
    client, server = ClientHandshake(b"other", SERVICE), ServerHandshake(SECRET, SERVICE)
    challenge = server.receive(client.opening)
    with pytest.raises(PeerAuthError):
        client.receive(challenge)
    with pytest.raises(PeerAuthError):
        server.receive(bytes(32))


def test_a_proof_cannot_be_played_back_or_reflected() -> None:
    client, server = ClientHandshake(SECRET, SERVICE), ServerHandshake(SECRET, SERVICE)
    challenge = server.receive(client.opening)
    proof = client.receive(challenge)
    again = ServerHandshake(SECRET, SERVICE)
    again.receive(client.opening)
    with pytest.raises(PeerAuthError):
        again.receive(proof)
    reflected = ServerHandshake(SECRET, SERVICE)
    its_own = reflected.receive(client.opening)[-32:]
    with pytest.raises(PeerAuthError):
        reflected.receive(its_own)


def test_another_version_is_named_and_another_service_refused() -> None:
    client, server = ClientHandshake(SECRET, SERVICE), ServerHandshake(SECRET, Service("test", 4))
    with pytest.raises(ProtocolError, match="speaks version 4 of test, we speak 3"):
        client.receive(server.receive(client.opening))
    with pytest.raises(ProtocolError, match="another service"):
        ServerHandshake(SECRET, Service("other", 3)).receive(client.opening)


@given(st.binary(min_size=52, max_size=52), st.binary(min_size=32, max_size=32))
def test_random_bytes_never_authenticate(hello: bytes, proof: bytes) -> None:
    server = ServerHandshake(SECRET, SERVICE)
    with pytest.raises((ProtocolError, PeerAuthError)):
        server.receive(hello)
        server.receive(proof)


@given(st.binary(min_size=69, max_size=69))
def test_a_client_trusts_no_random_challenge(challenge: bytes) -> None:
    with pytest.raises((ProtocolError, PeerAuthError)):
        ClientHandshake(SECRET, SERVICE).receive(challenge)


def test_empty_secrets_and_bad_services_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        ClientHandshake(b"", SERVICE)
    with pytest.raises(ValueError, match="service name"):
        Service("a name that is too long", 1)


class _Recorder(asyncio.Protocol):
    """Keeps what it gets; with `echoes` it also sends it back."""

    def __init__(self, echoes: bool = False) -> None:
        self._echoes = echoes
        self.received = bytearray()
        self.grown = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.grown.set()
        if self._echoes:
            self.transport.write(data)


async def _listen(timeout_s: float = PATIENCE_S) -> ConnectionListener:
    return await listen(
        "tcp://127.0.0.1:0",
        secret=SECRET,
        service=SERVICE,
        make_protocol=lambda: _Recorder(echoes=True),
        timeout_s=timeout_s,
    )


async def _dial(url: str, secret: bytes = SECRET, timeout_s: float = PATIENCE_S) -> _Recorder:
    return await dial(url, secret=secret, service=SERVICE, make_protocol=_Recorder, timeout_s=timeout_s)


async def test_dial_and_listen_hand_the_connection_over() -> None:
    listener = await _listen()
    mine = await _dial(listener.endpoint.url)
    mine.transport.write(b"hello")
    await mine.grown.wait()
    assert mine.received == b"hello"
    mine.transport.close()
    listener.close()


async def test_bytes_that_come_together_with_the_proof_reach_the_protocol() -> None:
    listener = await _listen()
    reader, writer = await asyncio.open_connection(listener.endpoint.host, listener.endpoint.port)
    client = ClientHandshake(SECRET, SERVICE)
    writer.write(client.opening)
    writer.write(client.receive(await reader.readexactly(client.needed)) + b"early")
    assert await reader.readexactly(5) == b"early"
    writer.close()
    await writer.wait_closed()
    listener.close()


async def test_a_dialler_with_another_secret_gets_auth_error() -> None:
    listener = await _listen()
    with pytest.raises(PeerAuthError, match="secret"):
        await _dial(listener.endpoint.url, secret=b"other")
    listener.close()


class _Log(logging.Handler):
    """Keeps warnings; `full` is set when there are two."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.full = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) == 2:
            self.full.set()


async def test_both_ends_log_another_secret_once() -> None:
    log = _Log()
    logging.getLogger("rdmacast").addHandler(log)
    try:
        listener = await _listen()
        with pytest.raises(PeerAuthError):
            await _dial(listener.endpoint.url, secret=b"other")
        async with asyncio.timeout(PATIENCE_S):
            await log.full.wait()
        listener.close()
        logged = sorted(log.lines)
        assert logged[0].startswith(
            f"test: cannot authenticate with {listener.endpoint.url}: the peer does not"
        )
        assert logged[1].startswith("test: refused a connection from 127.0.0.1:")
        assert logged[1].endswith("it has another secret than this cluster's") and len(logged) == 2
    finally:
        logging.getLogger("rdmacast").removeHandler(log)


async def test_a_listener_hangs_up_on_a_wrong_proof_and_on_silence() -> None:
    listener = await _listen()
    reader, writer = await asyncio.open_connection(listener.endpoint.host, listener.endpoint.port)
    client = ClientHandshake(SECRET, SERVICE)
    writer.write(client.opening)
    await reader.readexactly(client.needed)
    writer.write(bytes(32))
    assert await reader.read() == b""
    writer.close()
    listener.close()
    listener = await _listen(timeout_s=0.1)
    reader, writer = await asyncio.open_connection(listener.endpoint.host, listener.endpoint.port)
    assert await reader.read() == b""  # it said nothing
    writer.close()
    assert "0 in handshake" in repr(listener)
    listener.close()


async def test_a_dialler_gives_up_on_silence_noise_and_nobody() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.read()

    async def noisy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            writer.write(b"HTTP/1.1 400 Bad Request" * 10)
            await reader.read()

    cases: list[tuple[type[CastError], float]] = [(LinkClosed, 0.1), (ProtocolError, PATIENCE_S)]
    for behaviour, (error, timeout_s) in zip((silent, noisy), cases, strict=True):
        server = await asyncio.start_server(behaviour, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(error):
            await _dial(f"tcp://127.0.0.1:{port}", timeout_s=timeout_s)
        server.close()
        await server.wait_closed()
    with pytest.raises(LinkClosed, match="cannot connect"):
        await _dial(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://h:1", "tcp://h", "tcp://:1", "tcp://h:1/x"])
def test_bad_addresses_are_named(url: str) -> None:
    with pytest.raises(ValueError, match="use tcp://host:port"):
        parse_url(url)


def test_an_ipv6_address_keeps_its_brackets() -> None:
    assert parse_url("tcp://[::1]:80").url == "tcp://[::1]:80"


@pytest.mark.parametrize(
    "url", ["", "tcp://nohost", "tcp://h:x", f"tcp://{'x' * 80}.example:1", "http://h:1"]
)
async def test_an_address_that_is_none_is_a_peer_that_cannot_be_reached(url: str) -> None:
    with pytest.raises(LinkClosed, match="cannot connect"):
        await _dial(url)
