"""One slice of K and V over a link between two nodes (see link.py). All of it blocks.

| from whoever has it | then |
|---|---|
| a header of 16 bytes: tokens, first layer, behind the last one, bytes (little-endian) | the bytes |

Who gets it knows the model, and so how many bytes they must be: it takes no others.
"""

import socket
import struct
import time

from invoker.engine.kv_cache import KvShape
from invoker.engine.kv_slices import KvSlice, bytes_of_slice, empty_slice
from invoker.stages.frames import LinkLost

PIECE_BYTES = 1 << 20
_HEAD = struct.Struct("<IHHQ")


def send_kv(to: socket.socket, one: KvSlice, within_s: float) -> None:
    """Raises OSError."""
    deadline = time.monotonic() + within_s
    data = bytes_of_slice(one)
    to.settimeout(within_s)
    to.sendall(_HEAD.pack(one.tokens, one.first, one.last, len(data)))
    for start in range(0, len(data), PIECE_BYTES):
        to.settimeout(_left(deadline))
        to.sendall(data[start : start + PIECE_BYTES])


def receive_kv(
    link: socket.socket, shape: KvShape, layers: tuple[int, int], most_tokens: int, within_s: float
) -> KvSlice:
    """K and V of those layers of a model of `shape`, of at most so many tokens. Raises LinkLost, OSError."""
    deadline = time.monotonic() + within_s
    head = bytearray(_HEAD.size)
    _fill(link, memoryview(head), deadline)
    tokens, first, last, nbytes = _HEAD.unpack(head)
    if (first, last) != layers or not 0 < tokens <= most_tokens:
        raise LinkLost(f"{tokens} tokens of the layers [{first}, {last}) came, not of {list(layers)}")
    one = empty_slice(shape, first, last, tokens)
    if one.nbytes != nbytes:
        raise LinkLost(f"{nbytes} bytes of K and V came for {one.nbytes}")
    _fill(link, bytes_of_slice(one), deadline)
    return one


def _fill(link: socket.socket, room: memoryview, deadline: float) -> None:
    while len(room):
        link.settimeout(_left(deadline))
        count = link.recv_into(room[:PIECE_BYTES])
        if not count:
            raise LinkLost("whoever has K and V has closed the link")
        room = room[count:]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("K and V take too long")
    return left
