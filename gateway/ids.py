"""Request ids: ours, or the client's where it is sane."""

import re
import secrets

_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def new_request_id() -> str:
    """A fresh id; unguessable, so that it may stand in a URL."""
    return f"req-{secrets.token_hex(12)}"


def request_id(given: bytes | None) -> str:
    """The client's `x-request-id` if it is sane, else a fresh one."""
    if given is not None and _SANE.fullmatch(given):
        return given.decode("ascii")
    return new_request_id()


def call_id(request: str, index: int) -> str:
    """The id of one call of a request: unique even where a client uses its request id twice."""
    return f"{request}/{index}-{secrets.token_hex(4)}"


def model_object_id(prefix: str, request: str) -> str:
    """The `id` field of an OpenAI object."""
    return f"{prefix}-{request}"
