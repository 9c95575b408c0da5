"""Request ids: ours, or the client's where it is sane."""

import os
import re

_POOL_BYTES = 4096
_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class _Pool:
    """Random bytes of the system, fetched in larger pieces: a call of it costs more than the id."""

    def __init__(self) -> None:
        self._digits = ""
        self._at = 0

    def take(self, nbytes: int) -> str:
        """So many bytes in hexadecimal; none is given twice."""
        start = self._at
        self._at = end = start + 2 * nbytes
        if end > len(self._digits):
            self._digits = os.urandom(_POOL_BYTES).hex()
            start, self._at = 0, 2 * nbytes
            end = self._at
        return self._digits[start:end]


_pool = _Pool()


def new_request_id() -> str:
    """A fresh id; unguessable, so that it may stand in a URL."""
    return f"req-{_pool.take(12)}"


def request_id(given: bytes | None) -> str:
    """The client's `x-request-id` if it is sane, else a fresh one."""
    if given is not None and _SANE.fullmatch(given):
        return given.decode("ascii")
    return new_request_id()


def call_id(request: str, index: int) -> str:
    """The id of one call of a request: unique even where a client uses its request id twice."""
    return f"{request}/{index}-{_pool.take(4)}"


def model_object_id(prefix: str, request: str) -> str:
    """The `id` field of an OpenAI object."""
    return f"{prefix}-{request}"
