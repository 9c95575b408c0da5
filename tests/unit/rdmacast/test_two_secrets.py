"""The handshake while the secret is rotated: every mixture of ends that share a secret authenticates."""

import asyncio
import secrets

import pytest

from rdmacast.errors import PeerAuthError
from rdmacast.protocol.connection import dial, listen
from rdmacast.protocol.handshake import ClientHandshake, Secret, ServerHandshake, Service
from tests.fixtures.patience import PATIENCE_S

SERVICE = Service("test", 1)
OLD, NEW, NEXT = b"the former secret", b"the new secret of all", b"the one after that"
HELD = {"old": (OLD,), "both": (NEW, OLD), "new": (NEW,), "later": (NEXT, NEW)}


class HintlessClient(ClientHandshake):
    """A client of a release that has one secret and a nonce of random bytes."""

    def __init__(self, secret: bytes, service: Service) -> None:
        super().__init__(secret, service)
        random = secrets.token_bytes(len(self._nonce))
        self.opening = self.opening[: -len(random)] + random
        self._nonce = random


class HintlessServer(ServerHandshake):
    """A server of a release that has one secret and looks for no hint."""

    def receive(self, message: bytes) -> bytes:
        held, self._secrets = self._secrets, (secrets.token_bytes(16), self._secrets[0])
        try:
            return super().receive(message)
        finally:
            self._secrets = held


class Peer(asyncio.Protocol):
    """An end of a connection that sends nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


def run(client: ClientHandshake, server: ServerHandshake) -> bool:
    """Return whether both ends authenticate."""
    try:
        server.receive(client.receive(server.receive(client.opening)))
    except PeerAuthError:
        return False
    assert client.needed == server.needed == 0
    return True


@pytest.mark.parametrize("serving", HELD)
@pytest.mark.parametrize("dialling", HELD)
def test_ends_authenticate_if_they_share_a_secret(dialling: str, serving: str) -> None:
    ours, theirs = HELD[dialling], HELD[serving]
    client, server = ClientHandshake(lambda: ours, SERVICE), ServerHandshake(lambda: theirs, SERVICE)
    assert run(client, server) is bool({*ours} & {*theirs})


@pytest.mark.parametrize(("name", "works"), [("old", True), ("both", True), ("new", False)])
def test_peers_without_hints_keep_the_former_secret(name: str, works: bool) -> None:
    held = HELD[name]
    assert run(HintlessClient(OLD, SERVICE), ServerHandshake(lambda: held, SERVICE)) is works
    assert run(ClientHandshake(lambda: held, SERVICE), HintlessServer(OLD, SERVICE)) is works


@pytest.mark.parametrize("held", [(), (b"",), (NEW, b""), (NEXT, NEW, OLD)])
def test_no_empty_secret_and_no_third(held: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match="empty, or there are more than 2"):
        ServerHandshake(lambda: held, SERVICE)


def test_hints_differ_each_time_and_do_not_contain_the_proof() -> None:
    clients = [ClientHandshake(OLD, SERVICE) for _ in range(64)]
    assert len({client.opening[-16:-8] for client in clients}) == 64
    challenge = ServerHandshake(OLD, SERVICE).receive(clients[0].opening)
    assert clients[0].opening[-8:] not in challenge + clients[0].receive(challenge)


async def test_listeners_and_diallers_follow_the_secrets_of_the_moment() -> None:
    held = {"server": (OLD,), "client": (OLD,)}
    listener = await listen(
        "tcp://127.0.0.1:0",
        secret=lambda: held["server"],
        service=SERVICE,
        make_protocol=Peer,
        timeout_s=PATIENCE_S,
    )

    async def connects(secret: Secret) -> bool:
        url = listener.endpoint.url
        try:
            made = await dial(url, secret=secret, service=SERVICE, make_protocol=Peer, timeout_s=PATIENCE_S)
        except PeerAuthError:
            return False
        made.transport.close()
        return True

    sides = ("server", "client")
    for ends in (sides, sides[::-1]):
        held.update(dict.fromkeys(sides, (OLD,)))
        for name in ("old", "both", "new"):
            for end in ends:
                held[end] = HELD[name]
                assert await connects(lambda: held["client"])
                assert await connects(OLD) is (OLD in held["server"])
    listener.close()
