"""Manifests as JSON bytes: canonical encoding, bounded and validated decoding."""

import hashlib
from collections import Counter
from math import prod

import msgspec

from registry.errors import CorruptImage
from registry.images.digests import DIGEST
from registry.images.manifest import HEADERLESS_FORMAT, MANIFEST_FORMAT, Manifest
from registry.images.safetensors_file import DTYPE_BYTES
from registry.images.verify import CHECKSUM_BYTES

MAX_MANIFEST_BYTES = 256 * 1024 * 1024
MAX_TENSORS = 1_000_000
MAX_TOWER = 32
KINDS = ("embed", "layer", "head")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON; equal manifests yield equal bytes."""
    return msgspec.json.encode(manifest)


def manifest_digest(encoded: bytes) -> str:
    """Return the SHA-256 (hex) under which an encoded manifest is stored."""
    return hashlib.sha256(encoded).hexdigest()


def decode_manifest(encoded: bytes) -> Manifest:
    """Return the manifest in `encoded`, fully checked. Raises CorruptImage with the violated rule."""
    if len(encoded) > MAX_MANIFEST_BYTES:
        raise CorruptImage(f"manifest: {len(encoded)} bytes exceed the limit of {MAX_MANIFEST_BYTES}")
    try:
        manifest = msgspec.json.decode(encoded, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptImage(f"manifest: {error}") from error
    _check(
        manifest.format in (HEADERLESS_FORMAT, MANIFEST_FORMAT),
        f"format {manifest.format} is not supported: deploy the function again",
    )
    _check(DIGEST.fullmatch(manifest.sha256) is not None, "sha256 must be 64 hex digits")
    _check(0 <= manifest.nbytes < 1 << 62, "nbytes is out of range")
    _check(
        len(manifest.units) == manifest.unit_count * CHECKSUM_BYTES,
        f"{len(manifest.units)} bytes of unit checksums, {manifest.unit_count} units need "
        f"{manifest.unit_count * CHECKSUM_BYTES}",
    )
    _check_tensors(manifest)
    _check_layers(manifest)
    return manifest


def _check_tensors(manifest: Manifest) -> None:
    _check(len(manifest.tensors) <= MAX_TENSORS, f"more than {MAX_TENSORS} tensors")
    names: set[str] = set()
    position, has_holes = 0, manifest.format == HEADERLESS_FORMAT
    if not has_holes:
        position = manifest.tensors[0].offset if manifest.tensors else manifest.nbytes
        _check(position > 0, "there is no header before the first tensor")
    for tensor in manifest.tensors:
        where = f"tensor {tensor.name[:200]!r}"
        _check(tensor.name not in names, f"{where} appears twice")
        names.add(tensor.name)
        _check(tensor.dtype in DTYPE_BYTES, f"{where}: unknown dtype {tensor.dtype[:40]!r}")
        _check(
            len(tensor.shape) <= 64 and all(0 <= size < 1 << 62 for size in tensor.shape),
            f"{where}: bad shape",
        )
        _check(
            tensor.nbytes == prod(tensor.shape) * DTYPE_BYTES[tensor.dtype],
            f"{where}: nbytes does not match dtype and shape",
        )
        follows = tensor.offset >= position if has_holes else tensor.offset == position
        _check(follows, f"{where} does not follow the tensor before it")
        position = tensor.offset + tensor.nbytes
    ends = position <= manifest.nbytes if has_holes else position == manifest.nbytes
    _check(ends, f"the tensors end at byte {position}, the image at {manifest.nbytes}")


def _check_layers(manifest: Manifest) -> None:
    position = 0
    layers: Counter[str] = Counter()  # by tower
    for span in manifest.layers:
        where = f"span {span.kind[:20]} {span.index}"
        _check(span.kind in KINDS, f"{where}: kind must be one of {', '.join(KINDS)}")
        _check(len(span.tower) <= MAX_TOWER, f"{where}: the tower's name is too long")
        wanted = layers[span.tower] if span.kind == "layer" else 0
        _check(span.index == wanted, f"{where}: the index must be {wanted}")
        layers[span.tower] += span.kind == "layer"
        _check(
            span.start == position and span.end >= span.start, f"{where}: spans must be contiguous from 0 on"
        )
        position = span.end
    _check(position == manifest.nbytes, "the spans do not cover the image")
    _check(
        layers.total() == manifest.num_layers,
        f"num_layers is {manifest.num_layers}, there are {layers.total()} layer spans",
    )


def _check(holds: bool, fault: str) -> None:
    if not holds:
        raise CorruptImage(f"manifest: {fault}")
