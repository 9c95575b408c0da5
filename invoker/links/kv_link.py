"""Sends one KV slice over a link between two nodes (see link.py); all functions block.

The node with the slice sends one frame: a KvHeader, with K and V as its payload. The receiver knows the
model's shape and refuses any other number of bytes.
"""

import socket
import time

import msgspec

from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.slices import KvSlice, empty_slice, slice_bytes
from invoker.links.framing import FrameFormat, FrameReader, LinkLost
from invoker.links.link import receive_frame, seconds_left

PIECE_BYTES = 1 << 20


class KvHeader(msgspec.Struct, frozen=True, array_like=True):
    """The number of tokens of a slice, and its layers `[first, last)`."""

    tokens: int
    first: int
    last: int


KV_FRAMES: FrameFormat[KvHeader] = FrameFormat(b"HCK1", (KvHeader,), max_message_bytes=64)


def send_kv(to: socket.socket, kv: KvSlice, timeout_s: float) -> None:
    """Send a slice within `timeout_s`. Raises OSError."""
    deadline = time.monotonic() + timeout_s
    data = slice_bytes(kv)
    to.settimeout(timeout_s)
    to.sendall(KV_FRAMES.encode(KvHeader(kv.tokens, kv.first, kv.last), len(data)))
    for start in range(0, len(data), PIECE_BYTES):
        to.settimeout(seconds_left(deadline))
        to.sendall(data[start : start + PIECE_BYTES])


def receive_kv(
    link: socket.socket, shape: KvShape, layers: tuple[int, int], max_tokens: int, timeout_s: float
) -> KvSlice:
    """Receive K and V of layers `[first, last)`, of at most `max_tokens` tokens. Raises LinkLost, OSError."""
    received: list[KvSlice] = []

    def payload_buffer(header: KvHeader, payload_bytes: int) -> memoryview:
        tokens, first, last = header.tokens, header.first, header.last
        if (first, last) != layers or not 0 < tokens <= max_tokens:
            raise LinkLost(
                f"received {tokens} tokens of layers [{first}, {last}), expected layers {list(layers)}"
            )
        kv = empty_slice(shape, first, last, tokens)
        if kv.nbytes != payload_bytes:
            raise LinkLost(f"received {payload_bytes} bytes of K and V, expected {kv.nbytes}")
        received.append(kv)
        return slice_bytes(kv)

    receive_frame(link, FrameReader(KV_FRAMES, payload_buffer), time.monotonic() + timeout_s)
    return received[0]
