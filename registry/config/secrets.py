"""API keys and the cluster's secret: their creation, reading and checks.

A key reads `hc_<id>_<secret>`: the id is public and finds the record, the secret carries 256 random bits of
which only the SHA-256 is stored. A secret file has mode 0600 and appears complete or not at all: it is
written to a draft beside its path and linked to it, so that of two concurrent first starts one wins.
`rotation` changes the cluster's secret.
"""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from registry.clock import Clock, SystemClock
from registry.errors import InvalidRecord, KeyRefused, NotFound
from registry.records.api_key import ApiKey, KeyRole
from registry.state import KeyState

SECRET_VARIABLE = "HYPERCAST_CLUSTER_SECRET"
REDIS_PASSWORD_VARIABLE = "HYPERCAST_REDIS_PASSWORD"
MIN_SECRET_BYTES = 32  # a stranger gets an HMAC in the handshake, by which a weak one could be guessed
ADMIN_TENANT = "admin"

_KEY = re.compile(r"hc_([a-z0-9]{4,64})_([A-Za-z0-9_-]{20,200})")


class NewKey(NamedTuple):
    """A new key: its record, and the key itself, which is shown once."""

    key: ApiKey
    plaintext: str


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """The id and the secret of a presented key."""

    id: str
    secret: str

    def __repr__(self) -> str:
        return f"PresentedKey(id={self.id!r}, secret=…)"


def new_api_key(
    tenant: str,
    role: KeyRole,
    name: str,
    *,
    functions: Sequence[str] = (),
    expires_at: float | None = None,
    clock: Clock | None = None,
) -> NewKey:
    """Create a key for `tenant`; the caller stores its record."""
    if not tenant:
        raise InvalidRecord("an API key needs a tenant")
    key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    record = ApiKey(
        id=key_id,
        digest=_digest(secret),
        tenant=tenant,
        role=role,
        name=name,
        created_at=(clock or SystemClock()).wall_s(),
        expires_at=expires_at,
        functions=tuple(functions),
    )
    return NewKey(record, f"hc_{key_id}_{secret}")


def parse_key(presented: str) -> PresentedKey:
    """Parse a presented key. Raises KeyRefused; the message never repeats the key."""
    found = _KEY.fullmatch(presented.strip())
    if found is None:
        raise KeyRefused("not an API key: the format is hc_<id>_<secret>")
    return PresentedKey(found[1], found[2])


def matches(key: ApiKey, presented: PresentedKey) -> bool:
    """Return whether the presented key is this one, in constant time."""
    return hmac.compare_digest(key.digest, _digest(presented.secret)) and key.id == presented.id


def check_usable(key: ApiKey, now: float) -> ApiKey:
    """Return the key, or raise KeyRefused if it is revoked or has expired."""
    if key.revoked_at is not None and key.revoked_at <= now:
        raise KeyRefused(f"API key {key.id} is revoked")
    if key.expires_at is not None and key.expires_at <= now:
        raise KeyRefused(f"API key {key.id} has expired")
    return key


def load_or_create_secret(path: Path | None, environ: Mapping[str, str] | None = None) -> bytes:
    """Return the newest secret: from HYPERCAST_CLUSTER_SECRET, else from the file, created if missing.

    A secret in the environment equals a file of the same text. Raises InvalidRecord if it is too short to
    protect anything, or if there is neither.
    """
    given = (os.environ if environ is None else environ).get(SECRET_VARIABLE, "").strip()
    if given:
        return _long_enough(given, SECRET_VARIABLE)
    if path is None:
        raise InvalidRecord(f"no cluster secret: set {SECRET_VARIABLE} or name a secret file")
    return parse_secrets(_read_or_create(path, secrets.token_hex(32)), str(path))[0]


def parse_secrets(text: str, source: str) -> tuple[bytes, ...]:
    """Return the secrets of a file, one per line: the newest, then the former one. Raises InvalidRecord."""
    lines = [line.strip() for line in text.strip().split("\n")]
    if len(lines) > 2:
        raise InvalidRecord(f"{source} has {len(lines)} lines: one secret, or while it is rotated two")
    return tuple(_long_enough(line, source) for line in lines)


async def load_or_create_admin_key(path: Path, state: KeyState) -> str:
    """Return the admin key of the file, created at the first start, and ensure that `state` has its record.

    A file that outlives its state (a new Redis) restores its key's record; a key revoked since stays revoked.
    """
    fresh = new_api_key(ADMIN_TENANT, KeyRole.ADMIN, "admin")
    plaintext = _read_or_create(path, fresh.plaintext)
    try:
        presented = parse_key(plaintext)
    except KeyRefused as error:
        raise InvalidRecord(f"{path} contains no API key: delete it to create a new one") from error
    try:
        known = await state.key(presented.id)
    except NotFound:
        await state.put_key(replace(fresh.key, id=presented.id, digest=_digest(presented.secret)))
    else:
        if not matches(known, presented):
            raise InvalidRecord(f"{path}: the secret differs from that of key {presented.id}")
    return plaintext


def redis_password(path: Path | None, environ: Mapping[str, str]) -> str:
    """Return the password of Redis: of the file, else of HYPERCAST_REDIS_PASSWORD, "" if there is neither.

    Raises InvalidRecord if the file cannot be read or is empty.
    """
    if path is None:
        return environ.get(REDIS_PASSWORD_VARIABLE, "").strip()
    try:
        password = path.read_text().strip()
    except OSError as error:
        raise InvalidRecord(f"--redis-password-file {path}: {error.strerror}") from error
    if not password:
        raise InvalidRecord(f"--redis-password-file {path} is empty")
    return password


def make_private(folder: Path) -> None:
    """Create a folder, with mode 0700; also set that of an existing one that is this user's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)


def secret_beside(redis_url: str) -> Path | None:
    """Return the `cluster.secret` in the folder of an embedded Redis's socket, if it is readable.

    A process that may open the socket's folder is on the cluster's own machine, as its own user.
    """
    if not redis_url.startswith("unix://"):
        return None
    socket = redis_url.removeprefix("unix://").partition("?")[0].rpartition("@")[2]
    path = Path(socket).parent / "cluster.secret"
    return path if os.access(path, os.R_OK) else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _long_enough(text: str, source: str) -> bytes:
    secret = text.encode()
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidRecord(
            f"{source} is too short: a cluster secret has {MIN_SECRET_BYTES} random characters or more, "
            "such as those of `openssl rand -hex 32`"
        )
    return secret


def _read_or_create(path: Path, content: str) -> str:
    """Return the stripped text of a secret file, created with `content` if it does not exist."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content + "\n")
            file.flush()
            os.fsync(file.fileno())
        # A link refuses an existing target, where a rename would replace it.
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return path.read_text().strip()
