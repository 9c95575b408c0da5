"""Frames between the node and a handler's process: 4 bytes of length, then one msgpack struct.

    node -> child   LoadHandler, then any number of StartCall and CancelCall
    child -> node   HandlerReady or LoadFailed, then for each StartCall: CallValue*, CallEnded or CallFailed

Neither side trusts the other's lengths: a frame over `max_frame` ends the connection.
"""

import asyncio
from collections.abc import Mapping
from typing import Literal

import msgspec

from invoker.handlers.confine import Sandbox
from registry.config.handler_spec import HandlerLimits

LENGTH_BYTES = 4
MAX_BODY_BYTES = 64 << 20  # of one request
OVERHEAD_BYTES = 4096  # an upper bound of what a struct adds to its payload


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class LoadHandler(_Frame, frozen=True, kw_only=True):
    """Confine the process, set its limits and environment, and load `function` from `file`."""

    file: str
    function: str
    env: Mapping[str, str]
    limits: HandlerLimits
    sandbox: Sandbox


class StartCall(_Frame, frozen=True, kw_only=True):
    """Call the handler with a JSON body."""

    call: int
    request_id: str
    body: bytes


class CancelCall(_Frame, frozen=True, kw_only=True):
    """The caller has left; the child still answers with CallEnded or CallFailed."""

    call: int


class HandlerReady(_Frame, frozen=True, kw_only=True):
    """The handler is loaded."""


class LoadFailed(_Frame, frozen=True, kw_only=True):
    """The handler could not be loaded. `message` goes to callers, the reason is in the log."""

    message: str


class CallValue(_Frame, frozen=True, kw_only=True):
    """One JSON value of a call."""

    call: int
    data: bytes
    stream: bool


class CallEnded(_Frame, frozen=True, kw_only=True):
    """The call has ended."""

    call: int


class CallFailed(_Frame, frozen=True, kw_only=True):
    """The call failed."""

    call: int
    kind: Literal["raised", "too_large", "cancelled", "out_of_memory"]
    message: str  # for the caller


ToChild = LoadHandler | StartCall | CancelCall
ToNode = HandlerReady | LoadFailed | CallValue | CallEnded | CallFailed

_encoder = msgspec.msgpack.Encoder()
to_child = msgspec.msgpack.Decoder(ToChild)
to_node = msgspec.msgpack.Decoder(ToNode)


class BadFrame(Exception):
    """The peer broke the protocol."""


def encode(frame: ToChild | ToNode) -> bytes:
    """Return the frame, preceded by its length."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_body(reader: asyncio.StreamReader, max_frame: int) -> bytes | None:
    """Return the next frame's bytes, or None at the end. Raises BadFrame for one too long or truncated."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if length > max_frame:
            raise BadFrame(f"a frame of {length} bytes exceeds the limit of {max_frame}")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise BadFrame("a frame is truncated") from error
        return None
    except ConnectionError:
        return None
