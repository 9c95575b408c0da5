"""Bounded readers of safetensors headers: single files and sharded checkpoints. Nothing is ever unpickled."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

from registry.errors import CheckpointError
from registry.images.remote import is_local, open_remote, reading

MAX_HEADER_BYTES = 100_000_000
# A parsed header takes up to twenty times its length, so it may be only this fraction of its file.
SMALL_HEADER_BYTES = 256 << 10  # a unit: the header of a small image
MIN_FILE_TO_HEADER = 16
MAX_INDEX_BYTES = 32 << 20
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file at the time its header was read; `size` and `mtime_ns` show whether it has changed since."""

    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor at `[offset, offset + nbytes)` of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: SourceFile
    offset: int
    nbytes: int


def read_checkpoint(folder: Path) -> dict[str, SourceTensor]:
    """Return the tensors of a checkpoint folder by name. Raises CheckpointError naming file and tensor."""
    with reading(folder):
        names = sorted(entry.name for entry in folder.iterdir())
    # The order in which transformers looks.
    if SINGLE_FILE in names:
        return read_header(folder / SINGLE_FILE)
    if INDEX_FILE in names:
        return _read_sharded(folder)
    safetensors = [name for name in names if name.endswith(".safetensors")]
    if len(safetensors) == 1:
        return read_header(folder / safetensors[0])
    if safetensors:
        raise CheckpointError(
            f"{folder} has {len(safetensors)} safetensors files ({', '.join(safetensors[:4])}…) but neither "
            f"{SINGLE_FILE} nor {INDEX_FILE}, which lists the tensors of each"
        )
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        raise CheckpointError(
            f"{folder} has only pickle weights ({pickles[0]}), which can run code when opened, so they are "
            "refused. Convert them once, where you trust them: "
            "AutoModel.from_pretrained(path).save_pretrained(new_path) with the model's own Auto class "
            "(for example AutoModelForCausalLM) writes safetensors"
        )
    raise CheckpointError(f"{folder} has no safetensors file")


@contextmanager
def open_source(path: Path) -> Iterator[tuple[BinaryIO, SourceFile]]:
    """Open a file, of this machine or of a store, and describe it as it is now. Raises OSError."""
    if is_local(path):
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            yield file, SourceFile(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns)
        return
    size = path.stat().st_size
    with open_remote(path) as remote:
        yield remote, SourceFile(path=path, size=size, mtime_ns=0)  # compared for local files only


def read_header(path: Path) -> dict[str, SourceTensor]:
    """Return the tensors of one safetensors file by name, with every rule of the format checked."""
    with reading(path):
        with open_source(path) as (file, source):
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{path.name} is truncated: {source.size} bytes is too short for a header"
                )
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path.name} is not a safetensors file, or corrupt: its header would be {length} bytes"
                )
            if 8 + length > source.size:
                raise CheckpointError(
                    f"{path.name} is truncated: its header needs {8 + length} bytes, it has {source.size}"
                )
            if length > max(SMALL_HEADER_BYTES, source.size // MIN_FILE_TO_HEADER):
                raise CheckpointError(
                    f"{path.name} is corrupt: {length} of its {source.size} bytes are its header"
                )
            raw = file.read(length)
    header = _parse_json(raw, f"the header of {path.name}")
    header.pop("__metadata__", None)
    data_start = 8 + length
    tensors = {name: _tensor(name, entry, source, data_start) for name, entry in header.items()}
    _check_cover(tensors, source, data_start)
    return tensors


def _tensor(name: str, entry: object, source: SourceFile, data_start: int) -> SourceTensor:
    where = f"tensor {name!r} of {source.path.name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: the entry must have dtype, shape and data_offsets, and only those")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where}: unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: the shape must be a list of integers of 0 or more")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets must be [begin, end) with 0 <= begin <= end")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if nbytes != end - begin:
        raise CheckpointError(
            f"{where}: {dtype} of shape {shape} needs {nbytes} bytes, its range has {end - begin}"
        )
    if data_start + end > source.size:
        raise CheckpointError(
            f"{source.path.name} is truncated: tensor {name!r} ends at byte {data_start + end}, "
            f"the file at {source.size}"
        )
    return SourceTensor(
        name=name, dtype=dtype, shape=tuple(shape), file=source, offset=data_start + begin, nbytes=nbytes
    )


def _are_sizes(value: object) -> bool:
    # bool is an int in Python, but not in JSON; the bound keeps products small.
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
    )


def _check_cover(tensors: Mapping[str, SourceTensor], source: SourceFile, data_start: int) -> None:
    """Check that the ranges cover the data exactly: no overlap, no hole, nothing behind the last."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != position:
            fault = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise CheckpointError(f"{source.path.name} is corrupt: tensor {tensor.name!r} {fault}")
        position += tensor.nbytes
    if position != source.size:
        raise CheckpointError(
            f"{source.path.name} is corrupt: {source.size - position} bytes behind the last tensor"
        )


def _read_sharded(folder: Path) -> dict[str, SourceTensor]:
    weight_map = load_json_object(folder / INDEX_FILE, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{INDEX_FILE}: weight_map must map tensor names to file names")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        _check_shard_name(shard)
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise CheckpointError(f"{len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:8])}")
    tensors: dict[str, SourceTensor] = {}
    for shard in shards:
        for name, tensor in read_header(folder / shard).items():
            if name not in weight_map:
                raise CheckpointError(f"tensor {name!r} of {shard} is not in {INDEX_FILE}")
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is in {tensors[name].file.path.name} and in {shard}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.path != folder / shard:
            raise CheckpointError(f"tensor {name!r} is not in {shard}, as {INDEX_FILE} declares")
    return tensors


def _check_shard_name(shard: str) -> None:
    """Check that a shard of the index is in the checkpoint's own folder."""
    if (
        not shard.endswith(".safetensors")
        or "\0" in shard
        or PurePosixPath(shard).name != shard
        or PureWindowsPath(shard).name != shard
    ):
        raise CheckpointError(
            f"{INDEX_FILE} names a file outside the checkpoint or of another kind: {shard!r}"
        )


def load_json_object(path: Path, limit: int) -> dict[str, object]:
    """Return the JSON object in a file of at most `limit` bytes. Raises CheckpointError."""
    return _parse_json(read_bounded(path, limit), path.name)


def read_bounded(path: Path, limit: int) -> bytes:
    """Return a file of at most `limit` bytes. Raises CheckpointError."""
    with reading(path):
        with open_source(path) as (file, source):
            # The size first: read(n) allocates n bytes, however short the file is.
            raw = file.read(min(source.size, limit) + 1)
    if len(raw) > limit:
        raise CheckpointError(f"{path} is too large: more than {limit} bytes")
    return raw


def _parse_json(raw: bytes, what: str) -> dict[str, object]:
    try:
        # RecursionError: nested too deep; ValueError: no JSON, no UTF-8, or an endless integer.
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is corrupt: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is corrupt: it must be a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} appears twice")
    return found
