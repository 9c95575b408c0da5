"""The manifest: the offsets of tensors in a model image, and the checksums of its units."""

from dataclasses import dataclass

UNIT_BYTES = 256 * 1024
ALIGNMENT = 256
MANIFEST_FORMAT = 2
# Images of format 1 have no header, and holes between tensors: engines here run them, other tools cannot.
HEADERLESS_FORMAT = 1
MAX_BLOCK_BYTES = 4 << 20  # while there are few
MIN_BLOCKS, MAX_BLOCKS = 16, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor at `[offset, offset + nbytes)` of the image, C-contiguous, little-endian.

    `dtype` is a safetensors name (F32, BF16, F16, I64, …); `name` is the checkpoint's. A tied head is stored
    once, under the embedding's name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpan:
    """A step of execution and its bytes `[start, end)`. `kind`: `embed`, `layer` (with `index`) or `head`.

    The first step has the header too.

    For models with two towers or stages, `tower` names which (`text`, `vision`, `stage0`, …), else "".
    """

    kind: str
    index: int
    tower: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything needed to read, check and bind an image of `nbytes` bytes, a standard safetensors file.

    `units` holds one xxh3-128 digest (16 bytes, big-endian, concatenated) for each run of UNIT_BYTES, the
    last possibly shorter. `sha256` is the image's identity (hex).
    """

    format: int
    architecture: str
    model_type: str
    tied_head: bool
    num_layers: int
    nbytes: int
    sha256: str
    tensors: tuple[TensorEntry, ...]
    layers: tuple[LayerSpan, ...]
    units: bytes

    @property
    def unit_count(self) -> int:
        return -(-self.nbytes // UNIT_BYTES)


def layer_borders(manifest: Manifest, block_bytes: int) -> tuple[int, ...]:
    """Return the blocks in which layers begin, ascending: a range from such a block on has whole layers.

    The first layer of a tower runs only with the embedding before it, so that one counts instead.
    """
    starts = [
        span.start
        for span in manifest.layers
        if span.start < span.end and (span.kind == "embed" or (span.kind == "layer" and span.index > 0))
    ]
    return tuple(sorted({start // block_bytes for start in starts}))


def layer_extent(manifest: Manifest, first: int, last: int) -> tuple[int, int]:
    """Return the bytes `[start, end)` that a node needs for the layers `[first, last)`, in whole units.

    The first layer needs the embedding too, the last one the final norm and the head; a tied head is the
    embedding. Units are rounded outwards, since they have the checksums.
    """
    edges = {"embed": 0, "head": manifest.num_layers - 1}
    spans = [span for span in manifest.layers if first <= edges.get(span.kind, span.index) < last]
    start = min((span.start for span in spans), default=0)
    end = max((span.end for span in spans), default=0)
    return start - start % UNIT_BYTES, min(manifest.nbytes, end + -end % UNIT_BYTES)


def default_blocks(nbytes: int) -> int:
    """Return the default block count of a cast: clamp(size / 1 MiB, 16, 512), at most the number of units."""
    units = max(1, -(-nbytes // UNIT_BYTES))
    return min(units, max(MIN_BLOCKS, min(MAX_BLOCKS, nbytes // (1 << 20))))


def min_blocks(nbytes: int) -> int:
    """Return the least number of blocks of a cast or pull: a block is read, verified and forwarded whole."""
    units = -(-nbytes // UNIT_BYTES)
    return max(1, min(units, MAX_BLOCKS, max(MIN_BLOCKS, -(-nbytes // MAX_BLOCK_BYTES))))


def block_bytes(nbytes: int, blocks: int) -> int:
    """Return the block size for about `blocks` blocks, in whole units, since units have the checksums."""
    units = max(1, round(nbytes / (blocks * UNIT_BYTES)), -(-nbytes // (MAX_BLOCKS * UNIT_BYTES)))
    return units * UNIT_BYTES
