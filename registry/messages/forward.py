"""Messages of requests that pass through to another engine's own server (see the table in `node`)."""

import hashlib
from typing import Literal

from registry.messages.base import Message
from registry.messages.trace import TraceContext

ForwardPath = Literal["/v1/completions", "/v1/chat/completions"]


def cache_salt(tenant: str, given: str = "") -> str:
    """Return the salt of a request's prefix cache, with the client's own, if any.

    Prefixes are cached by tenant, so that none learns from a time what another has sent.
    """
    return hashlib.sha256(f"{tenant}\0{given}".encode()).hexdigest()


class ForwardRequest(Message, frozen=True, kw_only=True):
    """A request to pass a body to the engine's server, as the client sent it but for the model's name.

    Of a stream the server reports the usage in each chunk; the client gets what it wants of that.
    """

    request_id: str
    instance_id: str
    path: ForwardPath
    body: bytes
    trace: TraceContext | None = None


class ForwardedHead(Message, frozen=True, kw_only=True):
    """The start of the server's response."""

    status: int
    content_type: str

    @property
    def is_stream(self) -> bool:
        """Whether each chunk is the data of one server-sent event."""
        return self.content_type.startswith("text/event-stream")


class ForwardedChunk(Message, frozen=True, kw_only=True):
    """A whole body, or the data of one event; the `last` one of a stream may be empty.

    `gpu_us` and tokens are the request's so far: the bill of an interrupted request, which has no
    RequestUsage.
    """

    data: bytes = b""
    last: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    gpu_us: int = 0
