"""The file of the audit log: JSON Lines in the data directory, rotated by size."""

import logging
import os
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from registry.errors import InvalidRecord

_MAX_BYTES = 16 << 20
_KEPT = 15  # older files


class _PrivateFile(RotatingFileHandler):
    """A rotated file with mode 0600."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return TextIOWrapper(os.fdopen(descriptor, "ab"), encoding="utf-8")


def write_audit_lines(path: Path | None, *, max_bytes: int = _MAX_BYTES) -> None:
    """Send the lines of the audit log to a file, else to the log of the gateway. Raises InvalidRecord."""
    lines = logging.getLogger("hypercast.audit")
    lines.setLevel(logging.INFO)
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = _PrivateFile(path, maxBytes=max_bytes, backupCount=_KEPT)
    except OSError as error:
        raise InvalidRecord(f"the audit log {path}: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    lines.handlers = [handler]
    lines.propagate = False
