"""Mutual authentication by a shared secret, as a pure exchange of three messages of fixed size.

    client → server   hello       magic, version, service, client nonce
    server → client   challenge   magic, version, server nonce, proof by the server
    client → server   proof       proof by the client

A proof is HMAC-SHA256 (RFC 2104) by the secret over role, service, version and both nonces, so neither an
old exchange nor the peer's own proof can be replayed. It authenticates the peer when the connection starts;
it does not protect the bytes that follow: on a hostile network use TLS beneath.

While the secret is rotated an end has two, the newest first. The client's nonce ends with two hints, 8
bytes each: HMAC-SHA256 by its newest and by its oldest secret over the rest of the nonce. The server proves
with the newest of its secrets which a hint fits, so it finds a common one wherever there is one, and the
client answers with the same. Where no hint fits, the client may be of a release without hints, which has
but one secret: the server proves with its oldest, the former one, as such clients do not take part in a
rotation. A server of such a release sees 32 bytes like any others, and the client accepts a proof by either
of its secrets.
"""

import hmac
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rdmacast.errors import CastError, LinkClosed, PeerAuthError, ProtocolError

MAGIC = b"HCA1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_SERVICE_BYTES = 15
MAX_SECRETS = 2
_HINT_BYTES = 8
_RANDOM_BYTES = NONCE_BYTES - 2 * _HINT_BYTES

# One secret, or what returns those that are valid now, the newest first; it is called for each connection.
Secret = bytes | Callable[[], Sequence[bytes]]

_HELLO = struct.Struct(f">4sB{MAX_SERVICE_BYTES}s{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f">4sB{NONCE_BYTES}s{PROOF_BYTES}s")


@dataclass(frozen=True, slots=True)
class Service:
    """The protocol after the handshake: a short ASCII name and a version that both ends must share."""

    name: str
    version: int

    def __post_init__(self) -> None:
        if not self.name.isascii() or not 1 <= len(self.name) <= MAX_SERVICE_BYTES:
            raise ValueError(f"bad service name {self.name!r}: use 1 to {MAX_SERVICE_BYTES} ASCII characters")
        if not 0 <= self.version <= 255:
            raise ValueError(f"a service version is 0 to 255, not {self.version}")

    @property
    def padded_name(self) -> bytes:
        return self.name.encode().ljust(MAX_SERVICE_BYTES, b"\0")


def secrets_of(secret: Secret) -> tuple[bytes, ...]:
    """Return the secrets that are valid now, the newest first. Raises ValueError."""
    held = tuple(secret()) if callable(secret) else (secret,)
    if not 1 <= len(held) <= MAX_SECRETS or not all(held):
        raise ValueError(f"the cluster's secret is empty, or there are more than {MAX_SECRETS}")
    return held


class Handshake(ABC):
    """One end of the handshake.

    Send `opening`, then pass each message of exactly `needed` bytes to `receive` and send what it returns,
    until `needed` is 0.
    """

    opening: bytes

    def __init__(self, secret: Secret, service: Service, needed: int) -> None:
        self.needed = needed
        self._secrets = secrets_of(secret)
        self._service = service

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._service.name}, {'waits' if self.needed else 'done'})"

    @abstractmethod
    def receive(self, message: bytes) -> bytes:
        """Read a message of `needed` bytes; returns the reply. Raises PeerAuthError or ProtocolError.

        After an exception the connection must be closed.
        """

    @abstractmethod
    def on_peer_closed(self) -> CastError:
        """Return the error for a peer that closes the connection now."""

    def _prove(self, secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
        name, version = self._service.padded_name, bytes([self._service.version])
        covered = b"\0".join((b"hypercast handshake", role, name, version))
        return hmac.digest(secret, covered + client_nonce + server_nonce, "sha256")


class ClientHandshake(Handshake):
    """The end that dialled."""

    def __init__(self, secret: Secret, service: Service) -> None:
        super().__init__(secret, service, _CHALLENGE.size)
        drawn = secrets.token_bytes(_RANDOM_BYTES)
        self._nonce = drawn + _hint(self._secrets[0], drawn) + _hint(self._secrets[-1], drawn)
        self.opening = _HELLO.pack(MAGIC, service.version, service.padded_name, self._nonce)

    def receive(self, message: bytes) -> bytes:
        magic, version, server_nonce, proof = _CHALLENGE.unpack(message)
        if magic != MAGIC:
            raise ProtocolError("the peer does not speak Hypercast's handshake")
        if version != self._service.version:
            raise ProtocolError(
                f"the peer speaks version {version} of {self._service.name}, we speak {self._service.version}"
            )
        for secret in self._secrets:
            if hmac.compare_digest(proof, self._prove(secret, b"server", self._nonce, server_nonce)):
                self.needed = 0
                return self._prove(secret, b"client", self._nonce, server_nonce)
        raise PeerAuthError("the peer does not have the cluster's secret")

    def on_peer_closed(self) -> CastError:
        return LinkClosed("the peer closed the connection during the handshake")


class ServerHandshake(Handshake):
    """The end that was dialled."""

    opening = b""

    def __init__(self, secret: Secret, service: Service) -> None:
        super().__init__(secret, service, _HELLO.size)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._secret = self._secrets[-1]
        self._client_nonce = b""
        self._client_version = service.version

    def receive(self, message: bytes) -> bytes:
        return self._verify(message) if self._client_nonce else self._challenge(message)

    def _challenge(self, hello: bytes) -> bytes:
        magic, version, name, client_nonce = _HELLO.unpack(hello)
        if magic != MAGIC:
            raise ProtocolError("the peer does not speak Hypercast's handshake")
        if name != self._service.padded_name:
            raise ProtocolError(f"the peer requested another service than {self._service.name}")
        # A client of another version gets our challenge too: it reads our version there and reports it.
        self._client_nonce, self._client_version = client_nonce, version
        self._secret = _hinted(self._secrets, client_nonce)
        self.needed = PROOF_BYTES
        proof = self._prove(self._secret, b"server", client_nonce, self._nonce)
        return _CHALLENGE.pack(MAGIC, self._service.version, self._nonce, proof)

    def _verify(self, proof: bytes) -> bytes:
        expected = self._prove(self._secret, b"client", self._client_nonce, self._nonce)
        if not hmac.compare_digest(proof, expected):
            raise PeerAuthError("the peer does not have the cluster's secret")
        self.needed = 0
        return b""

    def on_peer_closed(self) -> CastError:
        if not self._client_nonce:
            return LinkClosed("the peer closed the connection during the handshake")
        if self._client_version != self._service.version:
            return ProtocolError(
                f"the peer speaks version {self._client_version} of {self._service.name}, "
                f"we speak {self._service.version}"
            )
        return PeerAuthError("the peer hung up on our proof: it has another secret than this cluster's")


def _hint(secret: bytes, drawn: bytes) -> bytes:
    return hmac.digest(secret, b"hypercast hint\0" + drawn, "sha256")[:_HINT_BYTES]


def _hinted(held: Sequence[bytes], client_nonce: bytes) -> bytes:
    """Return the newest secret for which the client's nonce has a hint, else the oldest."""
    drawn, hints = client_nonce[:_RANDOM_BYTES], client_nonce[_RANDOM_BYTES:]
    for secret in held:
        hint = _hint(secret, drawn)
        if any(hmac.compare_digest(hint, hints[at : at + _HINT_BYTES]) for at in (0, _HINT_BYTES)):
            return secret
    return held[-1]
