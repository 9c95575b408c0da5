"""Copying an image to the accelerator in the order in which it arrives, and which layers are there."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from invoker.arena import COPIES_IN_FLIGHT, Arena, Copied, Region
from invoker.engine.image_ranges import bytes_of_layers
from invoker.threads import in_thread
from invoker.together import together
from registry.images.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The bytes `[start, end)` of an image; a part of what `layer` needs (None: of what no layer needs)."""

    start: int
    end: int
    layer: int | None


def pieces_of(manifest: Manifest, most_bytes: int, first_layer: int = 0) -> tuple[Piece, ...]:
    """All of an image, cut at the layers' borders and into pieces of at most `most_bytes`: the layers in
    order from `first_layer` on, around the end."""
    count = manifest.num_layers
    spans: list[tuple[int, int, int | None]] = []
    for index in range(count):
        layer = (first_layer + index) % count
        spans += [(start, end, layer) for start, end in bytes_of_layers(manifest, layer, layer + 1)]
    spans += [(start, end, None) for start, end in _gaps(spans, manifest.nbytes)]
    return tuple(
        Piece(start=at, end=min(end, at + most_bytes), layer=layer)
        for start, end, layer in spans
        for at in range(start, end, most_bytes)
    )


def _gaps(spans: Sequence[tuple[int, int, int | None]], nbytes: int) -> Iterator[tuple[int, int]]:
    end = 0
    for start, after, _ in sorted(spans, key=lambda span: span[:2]):
        if start > end:
            yield end, start
        end = max(end, after)
    if end < nbytes:
        yield end, nbytes


class HeldLayers:
    """Which layers are complete (`bits`), from which pieces were copied."""

    def __init__(self, pieces: Sequence[Piece], layers: int) -> None:
        self._left = [0] * layers
        for piece in pieces:
            if piece.layer is not None:
                self._left[piece.layer] += 1
        self.bits = sum(1 << layer for layer, left in enumerate(self._left) if not left)

    def __repr__(self) -> str:
        return f"<HeldLayers {self.bits.bit_count()} of {len(self._left)}>"

    def copied(self, piece: Piece) -> bool:
        """Whether a layer is complete by this piece."""
        if piece.layer is None:
            return False
        self._left[piece.layer] -= 1
        if self._left[piece.layer]:
            return False
        self.bits |= 1 << piece.layer
        return True


async def copy_arriving(
    arena: Arena,
    region: Region,
    source: memoryview,
    pieces: Sequence[Piece],
    wait_for: Callable[[int, int], Awaitable[None]],
    on_copied: Callable[[Piece], None],
) -> Copied:
    """Copy all pieces of `source` into `region`, each as soon as it is there, whatever comes first.

    `wait_for(offset, nbytes)` returns once those bytes may be read. After cancellation nothing is written to
    the region any more.
    """
    places = asyncio.Semaphore(COPIES_IN_FLIGHT)
    copies = 0
    busy_s = began_s = 0.0

    async def bring(piece: Piece) -> None:
        nonlocal copies, busy_s, began_s
        await wait_for(piece.start, piece.end - piece.start)
        async with places:
            if not copies:
                began_s = time.perf_counter()
            copies += 1
            try:
                await in_thread(arena.copy_in, region, piece.start, source[piece.start : piece.end])
            finally:
                copies -= 1
                if not copies:
                    busy_s += time.perf_counter() - began_s
        on_copied(piece)

    await together(*(bring(piece) for piece in pieces))
    return Copied(sum(piece.end - piece.start for piece in pieces), busy_s)
