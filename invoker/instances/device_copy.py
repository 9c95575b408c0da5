"""Copies an image to the accelerator in order of arrival, and tracks complete layers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from invoker.engine.image_ranges import layer_byte_ranges
from invoker.memory.arena import Arena, CopyReport, Region, copy_bytes
from rdmacast.aio.groups import run_all
from rdmacast.aio.threads import run_in_thread
from registry.images.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePiece:
    """The bytes `[start, end)` of an image, needed by `layer` (None: by no layer)."""

    start: int
    end: int
    layer: int | None


def pieces_of(manifest: Manifest, max_bytes: int, first_layer: int = 0) -> tuple[ImagePiece, ...]:
    """Split an image at the layers' borders into pieces of at most `max_bytes`.

    Layers are in order from `first_layer` on, wrapping around.
    """
    count = manifest.num_layers
    spans: list[tuple[int, int, int | None]] = []
    for index in range(count):
        layer = (first_layer + index) % count
        spans += [(start, end, layer) for start, end in layer_byte_ranges(manifest, layer, layer + 1)]
    spans += [(start, end, None) for start, end in _gaps(spans, manifest.nbytes)]
    return cut_spans(spans, max_bytes)


def cut_spans(spans: Iterable[tuple[int, int, int | None]], max_bytes: int) -> tuple[ImagePiece, ...]:
    """Cut spans `[start, end)` of layers (None: of no layer) into pieces of at most `max_bytes`."""
    return tuple(
        ImagePiece(start=at, end=min(end, at + max_bytes), layer=layer)
        for start, end, layer in spans
        for at in range(start, end, max_bytes)
    )


def _gaps(spans: Sequence[tuple[int, int, int | None]], nbytes: int) -> Iterator[tuple[int, int]]:
    end = 0
    for start, after, _ in sorted(spans, key=lambda span: span[:2]):
        if start > end:
            yield end, start
        end = max(end, after)
    if end < nbytes:
        yield end, nbytes


class CopiedLayers:
    """The bitmap of complete layers (`bits`), updated as pieces are copied."""

    def __init__(self, pieces: Sequence[ImagePiece], layers: int) -> None:
        self._left = [0] * layers
        for piece in pieces:
            if piece.layer is not None:
                self._left[piece.layer] += 1
        self.bits = sum(1 << layer for layer, left in enumerate(self._left) if not left)

    def __repr__(self) -> str:
        return f"<CopiedLayers {self.bits.bit_count()} of {len(self._left)}>"

    def add(self, piece: ImagePiece) -> bool:
        """Record a copied piece; return whether it completes a layer."""
        if piece.layer is None:
            return False
        self._left[piece.layer] -= 1
        if self._left[piece.layer]:
            return False
        self.bits |= 1 << piece.layer
        return True


async def copy_in(arena: Arena, region: Region, offset: int, data: memoryview) -> None:
    """Copy host memory to `[offset, offset + len(data))` of the region. Raises OutOfPinnedMemory."""

    def copy(lent: memoryview) -> None:
        copy_bytes(lent, data)
        arena.fill(region, offset, lent)

    async with arena.lend(region, offset, len(data)) as lent:
        await run_in_thread(copy, lent)


async def copy_arriving(
    arena: Arena,
    region: Region,
    source: memoryview | None,
    pieces: Sequence[ImagePiece],
    wait_for: Callable[[int, int], Awaitable[None]],
    on_copied: Callable[[ImagePiece], None] = lambda _: None,
    base: int = 0,
) -> CopyReport:
    """Copy all pieces of `source` into `region`, each as soon as it is available, in any order.

    The region has the image's bytes from `base` on. Without a `source` they arrive there by themselves.

    `wait_for(offset, nbytes)` returns once those bytes may be read. After cancellation nothing is written to
    the region.
    """
    slots = asyncio.Semaphore(arena.copies_in_flight)
    copies = 0
    busy_s = started_s = 0.0

    async def copy_piece(piece: ImagePiece) -> None:
        nonlocal copies, busy_s, started_s
        await wait_for(piece.start, piece.end - piece.start)
        if source is None:
            on_copied(piece)
            return
        async with slots:
            if not copies:
                started_s = time.perf_counter()
            copies += 1
            try:
                await copy_in(arena, region, piece.start - base, source[piece.start : piece.end])
            finally:
                copies -= 1
                if not copies:
                    busy_s += time.perf_counter() - started_s
        on_copied(piece)

    await run_all(*(copy_piece(piece) for piece in pieces))
    return CopyReport(sum(piece.end - piece.start for piece in pieces), busy_s)
