"""Checkpoints in object stores and on hubs, read in place: paths by fsspec that behave as pathlib's.

hf://ORG/NAME[@REVISION]   a commit of a Hugging Face repository
s3://BUCKET/FOLDER         with the extra [s3]; credentials and endpoint as for other tools ($AWS_…)
gs://BUCKET/FOLDER         with the extra [gs]
file:///FOLDER             a local folder
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

from registry.errors import CheckpointError

SCHEMES = ("hf", "s3", "gs", "file")
EXTRAS = {"s3": ("s3fs", "hypercast[s3]"), "gs": ("gcsfs", "hypercast[gs]")}
REMOTE_BLOCK_BYTES = 4 << 20
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.+)")
_REASON_CHARS = 300


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Raise CheckpointError for what reading a path raises: libraries of stores have trees of their own."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if isinstance(path, Path) and not isinstance(error, OSError):
            raise
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return why a read failed, in a line."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (reason.strip().splitlines() or [type(error).__name__])[0][:_REASON_CHARS]


def is_local(path: object) -> bool:
    """Return whether a path is one of this machine."""
    return isinstance(path, Path)


def url_of(name: str) -> tuple[str, str] | None:
    """Return scheme and rest of a URL, None for anything else. Raises CheckpointError for another scheme."""
    found = _URL.fullmatch(name)
    if found is None:
        return None
    if found["scheme"] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise CheckpointError(f"{name}: models come from {known}, a folder or a hub id")
    return found["scheme"], found["rest"]


def open_folder(scheme: str, rest: str) -> Path:
    """Return a folder of a store as a path. Raises CheckpointError."""
    if scheme == "file":
        return Path("/" + unquote(rest).lstrip("/"))
    if scheme in EXTRAS:
        module, extra = EXTRAS[scheme]
        try:
            __import__(module)
        except ImportError as error:
            raise CheckpointError(f"{scheme}:// needs pip install '{extra}': {error}") from error
    from upath import UPath

    with reading(f"{scheme}://{rest}"):
        return cast(Path, UPath(f"{scheme}://{rest}"))


def open_remote(path: Any) -> AbstractContextManager[BinaryIO]:
    """Open a remote file for reading from its start."""
    return cast(AbstractContextManager[BinaryIO], path.open("rb", block_size=REMOTE_BLOCK_BYTES))


def read_range(path: Any, offset: int, into: memoryview) -> None:
    """Fill `into` with bytes of a remote file. Raises CheckpointError."""
    with reading(path):
        data = path.fs.cat_file(path.path, start=offset, end=offset + len(into))
    if len(data) != len(into):
        raise CheckpointError(f"{path} was truncated while it was being packed")
    into[:] = data
