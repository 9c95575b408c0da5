"""Sends K and V of a sequence over a link between two nodes (see link.py); all functions block.

The node with the export sends a KvHeader, then frames of KvRange with their K and V as payload, as they are
exported, until all has been sent. The receiver knows the model's shape and refuses anything else.
"""

import socket
import time

import msgspec
import torch

from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.export import KvExport, KvRange
from invoker.engine.kv.slices import KvSlice, empty_slice, tensor_bytes
from invoker.links.framing import FrameFormat, FrameReader, LinkLost, new_buffer
from invoker.links.link import receive_frame, seconds_left

PIECE_BYTES = 1 << 20


class KvHeader(msgspec.Struct, frozen=True, array_like=True):
    """The number of tokens of a slice, and its layers `[first, last)`."""

    tokens: int
    first: int
    last: int


KV_FRAMES: FrameFormat[KvHeader | KvRange] = FrameFormat(b"HCK2", (KvHeader, KvRange), max_message_bytes=64)


def send_kv(to: socket.socket, export: KvExport, timeout_s: float) -> None:
    """Send an export, which may be under way, within `timeout_s`. Raises OSError."""
    deadline = time.monotonic() + timeout_s
    to.settimeout(timeout_s)
    to.sendall(KV_FRAMES.encode(KvHeader(export.tokens, export.first, export.last)))
    for part in export.arriving(timeout_s):
        data = tensor_bytes(export.view(part).contiguous())
        to.settimeout(seconds_left(deadline))
        to.sendall(KV_FRAMES.encode(part, len(data)))
        for start in range(0, len(data), PIECE_BYTES):
            to.settimeout(seconds_left(deadline))
            to.sendall(data[start : start + PIECE_BYTES])


def receive_kv(
    link: socket.socket, shape: KvShape, layers: tuple[int, int], max_tokens: int, timeout_s: float
) -> KvSlice:
    """Receive K and V of layers `[first, last)`, of at most `max_tokens` tokens. Raises LinkLost, OSError."""
    arrival = _Arrival(shape, layers, max_tokens)
    reader, deadline = FrameReader(KV_FRAMES, arrival.buffer), time.monotonic() + timeout_s
    while not arrival.is_complete:
        receive_frame(link, reader, deadline)
        arrival.received()
    assert arrival.kv is not None
    return arrival.kv


class _Arrival:
    """A slice that is being received."""

    def __init__(self, shape: KvShape, layers: tuple[int, int], max_tokens: int) -> None:
        self._shape = shape
        self._layers = layers
        self._max_tokens = max_tokens
        self._filled = [0] * (layers[1] - layers[0])  # tokens of each layer, from the first on
        self._part: KvRange | None = None  # being received, to `_rows`
        self._rows = torch.empty(0)
        self.kv: KvSlice | None = None

    @property
    def is_complete(self) -> bool:
        return self.kv is not None and min(self._filled) == self.kv.tokens

    def buffer(self, message: KvHeader | KvRange, payload_bytes: int) -> memoryview:
        """Return the buffer for a frame's payload. Raises LinkLost."""
        if isinstance(message, KvHeader):
            self._open(message)
            return new_buffer(payload_bytes, 0)
        rows = self._place(message)
        if rows.nbytes != payload_bytes:
            raise LinkLost(f"received {payload_bytes} bytes of K and V, expected {rows.nbytes}")
        self._part = message
        # One layer's tokens are not adjacent to the next one's, unless they are all.
        self._rows = (
            rows if rows.is_contiguous() else torch.empty_like(rows, memory_format=torch.contiguous_format)
        )
        return tensor_bytes(self._rows)

    def received(self) -> None:
        """Count the part whose payload was received, if any."""
        part, self._part = self._part, None
        if part is None:
            return
        place = self._place(part)
        if place.data_ptr() != self._rows.data_ptr():
            place.copy_(self._rows)
        base = self._layers[0]
        self._filled[part.first - base : part.last - base] = [part.end] * (part.last - part.first)

    def _open(self, header: KvHeader) -> None:
        if (
            self.kv is not None
            or (header.first, header.last) != self._layers
            or not 0 < header.tokens <= self._max_tokens
        ):
            raise LinkLost(
                f"received {header.tokens} tokens of layers [{header.first}, {header.last}), "
                f"expected layers {list(self._layers)}"
            )
        self.kv = empty_slice(self._shape, header.first, header.last, header.tokens)

    def _place(self, part: KvRange) -> torch.Tensor:
        """Return where the rows of a part go. Raises LinkLost unless they are next in their layers."""
        base, top = self._layers
        filled = self._filled[max(0, part.first - base) : max(0, part.last - base)]
        if (
            self.kv is None
            or not base <= part.first < part.last <= top
            or set(filled) != {part.start}
            or not part.start < part.end <= self.kv.tokens
        ):
            raise LinkLost(f"received K and V of {part}, which do not come next")
        return self.kv.data[part.first - base : part.last - base, :, part.start : part.end]
