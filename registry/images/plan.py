"""A virtual image: the bytes of checkpoint files that make it up, readable in any range without a copy."""

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from registry.errors import CheckpointError
from registry.images.architectures import Arrangement, arrange, read_config
from registry.images.dtypes import FLOATS, convert, dominant_dtype
from registry.images.layout import Layout, encode_header, lay_out
from registry.images.remote import is_local, read_range
from registry.images.safetensors_file import DTYPE_BYTES, SourceFile, SourceTensor, read_checkpoint
from registry.records.engine import EngineKind

CHUNK_BYTES = 4 * 1024 * 1024
CONVERT_ELEMENTS = 256 * 1024
_COUNTERS = "num_batches_tracked"  # the only integers among weights


class ImagePlan(Protocol):
    """A planned image: its manifest but for the checksums, and its bytes."""

    @property
    def architecture(self) -> str: ...

    @property
    def model_type(self) -> str: ...

    @property
    def tied_head(self) -> bool: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def nbytes(self) -> int: ...

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with `[offset, offset + len(into))` of the image."""
        ...


def image_chunks(plan: ImagePlan, offset: int = 0, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield the image from `offset` on in pieces, each valid until the next is requested."""
    buffer = memoryview(bytearray(min(size, max(0, plan.nbytes - offset))))
    while offset < plan.nbytes:
        view = buffer[: min(size, plan.nbytes - offset)]
        plan.read_into(offset, view)
        yield view
        offset += len(view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Bytes `[start, end)` of the image: one tensor, at `offset` of its file."""

    start: int
    end: int
    file: SourceFile
    offset: int
    stored: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PackPlan:
    """A planned image of a checkpoint. Plans hold no open files; every read opens the files that it needs.

    A read raises CheckpointError if a file has changed since the plan was made. `dtype` is the compute dtype
    (`float32`, `bfloat16`, `float16`); `header` is the start of the image, which the tensors in `segments`
    follow; `dropped` names tensors that are left out.
    """

    config: dict[str, object]
    architecture: str
    model_type: str
    dtype: str
    tied_head: bool
    num_layers: int
    layout: Layout
    header: bytes
    segments: tuple[Segment, ...]
    dropped: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<PackPlan {self.architecture} {self.dtype}, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with `[offset, offset + len(into))` of the image."""
        end = offset + len(into)
        if not 0 <= offset <= end <= self.nbytes:
            raise ValueError(f"[{offset}, {end}) is not within the image's {self.nbytes} bytes")
        head = self.header[offset:end]
        into[: len(head)] = head
        first = max(0, bisect_right(self.segments, offset, key=lambda segment: segment.start) - 1)
        with _Files() as files:
            for segment in islice(self.segments, first, None):
                if segment.start >= end:
                    break
                start, stop = max(segment.start, offset), min(segment.end, end)
                if start < stop:
                    _read_segment(segment, start, into[start - offset : stop - offset], files)


class _Files:
    """The files of one read, opened once each and checked against their state in the plan."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def read(self, source: SourceFile, offset: int, into: memoryview) -> None:
        """Fill `into` with bytes of a file. Raises CheckpointError."""
        if is_local(source.path):
            _read_exactly(self._descriptor(source), source, offset, into)
        else:
            read_range(source.path, offset, into)

    def _descriptor(self, source: SourceFile) -> int:
        file = self._open.get(source.path)
        if file is None:
            try:
                file = open(source.path, "rb", buffering=0)  # noqa: SIM115 (closed in __exit__)
            except OSError as error:
                raise CheckpointError(f"cannot read {source.path}: {error.strerror}") from error
            self._open[source.path] = file
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
                raise CheckpointError(f"{source.path} has changed while it was being packed")
        return file.fileno()


def _read_segment(segment: Segment, start: int, into: memoryview, files: _Files) -> None:
    """Fill `into` with the segment's bytes from image offset `start` on."""
    skip = start - segment.start
    if segment.stored == segment.dtype:
        files.read(segment.file, segment.offset + skip, into)
        return
    # Conversion is element by element, so a range of the image maps to a range of the file; its
    # ends may cut an element, hence whole elements are converted and the ends trimmed.
    wide, narrow = DTYPE_BYTES[segment.stored], DTYPE_BYTES[segment.dtype]
    first, last = skip // narrow, -(-(skip + len(into)) // narrow)
    buffer = memoryview(bytearray(min(last - first, CONVERT_ELEMENTS) * wide))
    filled = 0
    for element in range(first, last, CONVERT_ELEMENTS):
        raw = buffer[: min(CONVERT_ELEMENTS, last - element) * wide]
        files.read(segment.file, segment.offset + element * wide, raw)
        done = convert(raw, segment.stored, segment.dtype)[max(0, skip - element * narrow) :]
        done = done[: len(into) - filled]
        into[filled : filled + len(done)] = done
        filled += len(done)


def _read_exactly(descriptor: int, source: SourceFile, offset: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        try:
            got = os.preadv(descriptor, [into[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"cannot read {source.path}: {error.strerror}") from error
        if got == 0:
            raise CheckpointError(f"{source.path} was truncated while it was being packed")
        done += got


def plan_checkpoint(
    path: str | Path, dtype: str = "auto", engine: EngineKind = EngineKind.NATIVE
) -> PackPlan:
    """Plan the image of a checkpoint folder: only headers are read, no weights. Raises CheckpointError."""
    folder = Path(path) if isinstance(path, str) else path
    if not folder.is_dir():
        raise CheckpointError(f"no such checkpoint folder: {folder}")
    config = read_config(folder)
    sources = read_checkpoint(folder)
    arrangement = arrange(config, sources.keys(), engine)
    if arrangement.head_to_compare is not None:
        pair = sources[arrangement.embedding], sources[arrangement.head_to_compare]
        if _equal(*pair):
            arrangement = arrangement.without_head()
    return _plan(config, arrangement, sources, dtype)


def _plan(
    config: dict[str, object], arrangement: Arrangement, sources: dict[str, SourceTensor], dtype: str
) -> PackPlan:
    row = arrangement.architecture
    placed = [sources[name] for part in arrangement.parts for name in part.names]
    if dtype != "auto" and row.is_foreign:
        raise CheckpointError(f"the weights of {row.name} are packed as they are: omit --dtype")
    if (
        dtype == "auto"
        and not row.is_foreign
        and len({source.dtype for source in placed if source.dtype in FLOATS}) > 1
    ):
        # One instance computes in one dtype: a few tensors kept in another are converted.
        dtype = dominant_dtype((source.dtype, source.nbytes) for source in placed)
    layout = lay_out(arrangement.parts, sources, dtype)
    for entry in layout.tensors:
        if entry.dtype not in FLOATS and not (row.is_foreign or entry.name.endswith(_COUNTERS)):
            raise CheckpointError(
                f"tensor {entry.name!r} is {entry.dtype}: weights must be {', '.join(FLOATS)}, "
                "quantized ones need another engine (--engine vllm)"
            )
    segments = tuple(
        Segment(
            start=entry.offset,
            end=entry.offset + entry.nbytes,
            file=sources[entry.name].file,
            offset=sources[entry.name].offset,
            stored=sources[entry.name].dtype,
            dtype=entry.dtype,
        )
        for entry in layout.tensors
        if entry.nbytes
    )
    return PackPlan(
        config=config,
        architecture=row.name,
        model_type=row.model_type,
        dtype=dominant_dtype((entry.dtype, entry.nbytes) for entry in layout.tensors),
        tied_head=arrangement.tied_head,
        num_layers=arrangement.num_layers,
        layout=layout,
        header=encode_header(layout.tensors),
        segments=segments,
        dropped=arrangement.dropped,
    )


def _equal(one: SourceTensor, other: SourceTensor) -> bool:
    """Return whether two tensors hold the same bytes, read in bounded pieces."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left, right = memoryview(bytearray(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    with _Files() as files:
        for start in range(0, one.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, one.nbytes - start)
            files.read(one.file, one.offset + start, left[:size])
            files.read(other.file, other.offset + start, right[:size])
            if left[:size] != right[:size]:
                return False
    return True
