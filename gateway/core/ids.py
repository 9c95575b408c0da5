"""Request ids: the gateway's own, and the client's where it is valid."""

import os
import re

_POOL_BYTES = 4096
_VALID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class _Pool:
    """A buffer of random bytes from the system: one system call for each id costs more than the id itself."""

    def __init__(self) -> None:
        self._digits = ""
        self._at = 0

    def hex(self, nbytes: int) -> str:
        """Return `nbytes` fresh random bytes in hexadecimal; no byte is returned twice."""
        start = self._at
        self._at = end = start + 2 * nbytes
        if end > len(self._digits):
            self._digits = os.urandom(_POOL_BYTES).hex()
            start, self._at = 0, 2 * nbytes
            end = self._at
        return self._digits[start:end]


_pool = _Pool()


def new_request_id() -> str:
    """Return a fresh, unguessable id that is safe in a URL."""
    return f"req-{_pool.hex(12)}"


def client_request_id(given: bytes | None) -> str:
    """Return the client's `x-request-id` if it is valid, else ""."""
    return given.decode("ascii") if given is not None and _VALID.fullmatch(given) else ""


def model_object_id(prefix: str, request: str) -> str:
    """Return the `id` field of an OpenAI object."""
    return f"{prefix}-{request}"
