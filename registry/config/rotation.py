"""The cluster's secret while it is rotated without a stop.

Its file then has two lines: the new secret, which is preferred, and the former one, which is accepted too.
Processes read the file again when it changes; connections that are open stay as they are.
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rdmacast.protocol.handshake import Secret
from rdmacast.reloaded import Reloaded
from registry.config.secrets import SECRET_VARIABLE, load_or_create_secret, parse_secrets
from registry.errors import Conflict


def cluster_secret(path: Path | None, environ: Mapping[str, str]) -> Secret:
    """Return the cluster's secret for handshakes: that of a file follows its changes.

    HYPERCAST_CLUSTER_SECRET comes before the file, which is created if missing.
    Raises InvalidRecord, OSError.
    """
    secret = load_or_create_secret(path, environ)
    if path is None or environ.get(SECRET_VARIABLE, "").strip():
        return secret
    return Reloaded(lambda: _read(path), (path,))


def rotate_secret(path: Path, sync: Callable[[int], None] = os.fsync) -> None:
    """Put a new secret before the one of a file. Raises Conflict if there are two, InvalidRecord, OSError.

    `sync` writes a file's or folder's data to its disk.
    """
    held = _read(path)
    if len(held) > 1:
        raise Conflict(f"{path} has two secrets already: finish that rotation first (--finish)")
    replace_secret(path, (secrets.token_hex(32).encode(), *held), sync)


def finish_rotation(path: Path) -> None:
    """Drop the former secret of a file. Raises Conflict if there is none, InvalidRecord, OSError."""
    held = _read(path)
    if len(held) == 1:
        raise Conflict(f"{path} has one secret: there is no rotation to finish")
    replace_secret(path, held[:1])


def replace_secret(path: Path, held: Sequence[bytes], sync: Callable[[int], None] = os.fsync) -> None:
    """Replace a secret file as a whole; its owner stays, and whether its group reads it.

    Raises OSError.
    """
    path = path.resolve()  # a rename would replace a link, and not what it points to
    former = path.stat()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            os.fchown(file.fileno(), former.st_uid, former.st_gid)
            os.fchmod(file.fileno(), 0o600 | former.st_mode & 0o040)
            file.write(b"".join(secret + b"\n" for secret in held))
            file.flush()
            sync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        sync(folder)
    finally:
        os.close(folder)


def _read(path: Path) -> tuple[bytes, ...]:
    return parse_secrets(path.read_text(), str(path))
