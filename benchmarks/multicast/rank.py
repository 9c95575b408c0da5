"""A rank that broadcasts an image, and the image's memory."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from benchmarks.harness.crew_member import serve
from benchmarks.harness.crew_messages import MemberHello
from benchmarks.harness.processor import process_cpu_s
from benchmarks.multicast.messages import (
    PROTOCOL,
    CastFinished,
    DigestReport,
    ImageReady,
    MulticastOrder,
    MulticastReply,
    PrepareImage,
    ReportDigest,
    StartCast,
)

Bytes = NDArray[np.uint8]
_WIPED = 0xFF


class BroadcastRank(Protocol):
    """A rank that broadcasts an image from rank 0 to all."""

    @property
    def rank(self) -> int: ...

    def allocate(self, nbytes: int) -> Bytes:
        """Return memory for the image; earlier memory is no longer used."""
        ...

    def cast(self, image: Bytes) -> CastFinished:
        """Wait for all other ranks, then broadcast; return its start and end here."""
        ...


def make_image(nbytes: int, seed: int) -> Bytes:
    """Return the bytes of a model, equal for equal seeds."""
    words = np.random.default_rng(seed).integers(0, 1 << 64, -(-nbytes // 8), dtype=np.uint64)
    return words.view(np.uint8)[:nbytes]


def digest(image: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(image.data)


class ImageBuffer:
    """The memory of an image, kept from cast to cast."""

    def __init__(self, allocate: Callable[[int], Bytes]) -> None:
        self._allocate = allocate
        self._made: tuple[int, int] | None = None  # size and seed of the generated image
        self._began_s = 0.0  # CPU time
        self.image = np.zeros(0, np.uint8)

    def __repr__(self) -> str:
        return f"HeldImage({self.image.nbytes} bytes, {'made' if self._made else 'received'})"

    def prepare(self, nbytes: int, seed: int, *, source: bool) -> None:
        """Hold the image, or memory for it."""
        if self.image.nbytes != nbytes:
            self.image, self._made = self._allocate(nbytes), None
        if not source:
            # Pre-faulted, so that no cast is timed while the kernel clears pages.
            self.image[:], self._made = _WIPED, None
        elif self._made != (nbytes, seed):
            self.image[:], self._made = make_image(nbytes, seed), (nbytes, seed)

    def begin(self) -> None:
        """Note the CPU time at a cast's start."""
        self._began_s = process_cpu_s()

    def report_digest(self) -> DigestReport:
        used_s = process_cpu_s() - self._began_s
        return DigestReport(digest=digest(self.image), cpu_s=used_s)


def serve_rank(path: str, rank: BroadcastRank) -> None:
    """Carry out orders until the benchmark closes the connection."""
    image = ImageBuffer(rank.allocate)

    def carry_out(order: MulticastOrder) -> MulticastReply:
        match order:
            case PrepareImage():
                image.prepare(order.nbytes, order.seed, source=rank.rank == 0)
                return ImageReady()
            case StartCast():
                image.begin()
                return rank.cast(image.image)
            case ReportDigest():
                return image.report_digest()

    serve(path, MemberHello(rank=rank.rank), PROTOCOL, carry_out)
