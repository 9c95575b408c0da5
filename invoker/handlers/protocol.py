"""Frames between the node and a handler's process: 4 bytes of length, then one msgpack struct.

    node -> child   Load, then any number of Invoke and Cancel
    child -> node   Ready or LoadFailed, then for each Invoke: Output*, and one of End, Failed

Neither side trusts the other's lengths: a frame over `max_frame` ends the connection.
"""

import asyncio
from typing import Literal

import msgspec

LENGTH_BYTES = 4
MAX_BODY_BYTES = 64 << 20  # of one request
OVERHEAD_BYTES = 4096  # what a struct adds to its payload, generously


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Load(_Frame, frozen=True, kw_only=True):
    """Set the limits, then load `function` from `file`. `sandbox` closes the file system to the child."""

    file: str
    function: str
    memory_bytes: int
    file_bytes: int
    open_files: int
    output_bytes: int
    threads: int
    sandbox: bool


class Invoke(_Frame, frozen=True, kw_only=True):
    """Call the handler with a JSON body."""

    call: int
    request_id: str
    body: bytes


class Cancel(_Frame, frozen=True, kw_only=True):
    """The caller has gone; the child still answers with End or Failed."""

    call: int


class Ready(_Frame, frozen=True, kw_only=True):
    """The handler is loaded. `confined` tells whether the kernel closed the file system to it."""

    confined: bool


class LoadFailed(_Frame, frozen=True, kw_only=True):
    """The handler could not be loaded."""

    message: str


class Output(_Frame, frozen=True, kw_only=True):
    """One JSON value of a call."""

    call: int
    data: bytes
    stream: bool


class End(_Frame, frozen=True, kw_only=True):
    """The call is over."""

    call: int


class Failed(_Frame, frozen=True, kw_only=True):
    """The call failed."""

    call: int
    kind: Literal["raised", "too_large", "cancelled", "out_of_memory"]
    message: str


ToChild = Load | Invoke | Cancel
ToNode = Ready | LoadFailed | Output | End | Failed

_encoder = msgspec.msgpack.Encoder()
to_child = msgspec.msgpack.Decoder(ToChild)
to_node = msgspec.msgpack.Decoder(ToNode)


class BadFrame(Exception):
    """The other side broke the protocol."""


def encode(frame: ToChild | ToNode) -> bytes:
    """One frame with its length before it."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_body(reader: asyncio.StreamReader, max_frame: int) -> bytes | None:
    """The next frame's bytes, or None at the end. Raises BadFrame for one too long or cut short."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if length > max_frame:
            raise BadFrame(f"a frame of {length} bytes, over the limit of {max_frame}")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise BadFrame("a frame was cut short") from error
        return None
    except ConnectionError:
        return None
