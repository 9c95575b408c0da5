"""The other end of a crew, for a process that blocks: a rank of a peer."""

import socket
from collections.abc import Callable
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from benchmarks.crew_messages import (
    Answer,
    Check,
    Checked,
    Done,
    Failed,
    Go,
    Hello,
    Order,
    Prepare,
    Ready,
    decode_order,
    encode,
)
from benchmarks.processor import own_s

Bytes = NDArray[np.uint8]
_WIPED = 0xFF


class Member(Protocol):
    """Broadcasts an image from rank 0 to all."""

    @property
    def rank(self) -> int: ...

    def room(self, nbytes: int) -> Bytes:
        """Memory for the image; what was given before is used no more."""
        ...

    def cast(self, image: Bytes) -> Done:
        """Wait for all others, then broadcast and say when that began and ended here."""
        ...


def make_image(nbytes: int, seed: int) -> Bytes:
    """The bytes of a model: the same for the same seed, and like no others."""
    words = np.random.default_rng(seed).integers(0, 1 << 64, -(-nbytes // 8), dtype=np.uint64)
    return words.view(np.uint8)[:nbytes]


def digest(image: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(image.data)


class HeldImage:
    """The memory of an image, kept from cast to cast; `room` makes it."""

    def __init__(self, room: Callable[[int], Bytes]) -> None:
        self._room = room
        self._made: tuple[int, int] | None = None  # size and seed of the image that was made here
        self._began_s = 0.0  # own processor time
        self.image = np.zeros(0, np.uint8)

    def __repr__(self) -> str:
        return f"HeldImage({self.image.nbytes} bytes, {'made' if self._made else 'received'})"

    def prepare(self, nbytes: int, seed: int, *, source: bool) -> None:
        """Hold the image, or have room for it."""
        if self.image.nbytes != nbytes:
            self.image, self._made = self._room(nbytes), None
        if not source:
            # Written, so that its pages are there: nobody is to be timed while the kernel clears them.
            self.image[:], self._made = _WIPED, None
        elif self._made != (nbytes, seed):
            self.image[:], self._made = make_image(nbytes, seed), (nbytes, seed)

    def begin(self) -> None:
        """A cast begins."""
        self._began_s = own_s()

    def checked(self) -> Checked:
        used_s = own_s() - self._began_s
        return Checked(digest=digest(self.image), cpu_s=used_s)


def serve(path: str, member: Member) -> None:
    """Carry out orders until the crew hangs up."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(path)
        connected.sendall(encode(Hello(rank=member.rank)) + b"\n")
        held = HeldImage(member.room)
        with connected.makefile("rb") as lines:
            for line in lines:
                try:
                    answer = _carry_out(decode_order(line), member, held)
                except Exception as error:  # whatever it is, the crew is told; then it ends this
                    connected.sendall(encode(Failed(reason=repr(error))) + b"\n")
                    raise
                connected.sendall(encode(answer) + b"\n")


def _carry_out(order: Order, member: Member, held: HeldImage) -> Answer:
    match order:
        case Prepare():
            held.prepare(order.nbytes, order.seed, source=member.rank == 0)
            return Ready()
        case Go():
            held.begin()
            return member.cast(held.image)
        case Check():
            return held.checked()
