"""Packing: hashing a planned image in one pass, and writing it to a folder."""

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from registry.errors import StoreError, StoreFull
from registry.images.assets import collect_assets
from registry.images.codec import encode_manifest
from registry.images.manifest import MANIFEST_FORMAT, Manifest
from registry.images.plan import CHUNK_BYTES, ImagePlan, PackPlan, plan_checkpoint
from registry.images.verify import unit_checksums

IMAGE_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
ASSETS_FOLDER = "assets"

Progress = Callable[[int], None]
"""Called with the number of image bytes done so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFolder:
    """The output of `pack_to_folder`."""

    path: Path
    manifest: Manifest
    manifest_digest: str
    assets: tuple[str, ...]


def hash_image(plan: ImagePlan, progress: Progress | None = None) -> Manifest:
    """Return the manifest of a planned image, in one pass over its bytes and bounded memory."""
    return _hash(plan, progress, sink=None)


def _hash(plan: ImagePlan, progress: Progress | None, sink: Callable[[memoryview], None] | None) -> Manifest:
    sha = hashlib.sha256()
    units = bytearray()
    done = 0
    # SHA-256 is by far the slowest step and releases the interpreter lock: it has a thread of its
    # own and two buffers, so that reading, unit checksums and writing cost no time beside it.
    size = min(CHUNK_BYTES, plan.nbytes)
    buffers = [memoryview(bytearray(size)) for _ in range(2 if plan.nbytes > size else 1)]
    with ThreadPoolExecutor(1, "sha256") as hasher:
        pending = hasher.submit(sha.update, b"")
        while done < plan.nbytes:
            view = buffers[done // CHUNK_BYTES % len(buffers)][: min(CHUNK_BYTES, plan.nbytes - done)]
            plan.read_into(done, view)
            pending.result()
            pending = hasher.submit(sha.update, view)
            units += unit_checksums(view)
            if sink is not None:
                sink(view)
            done += len(view)
            if progress is not None:
                progress(done)
        pending.result()
    return Manifest(
        format=MANIFEST_FORMAT,
        architecture=plan.architecture,
        model_type=plan.model_type,
        tied_head=plan.tied_head,
        num_layers=plan.num_layers,
        nbytes=plan.nbytes,
        sha256=sha.hexdigest(),
        tensors=plan.layout.tensors,
        layers=plan.layout.layers,
        units=bytes(units),
    )


def pack_to_folder(
    path: str | Path, out: str | Path, dtype: str = "auto", progress: Progress | None = None
) -> PackedFolder:
    """Write `model.safetensors`, `manifest.json` and `assets/` into the new folder `out`.

    All or nothing: the files are written beside `out` and renamed to it at the end. Raises CheckpointError,
    StoreFull (checked first) and StoreError (`out` exists, or cannot be written).
    """
    plan = plan_checkpoint(path, dtype)
    assets = collect_assets(path)
    target = Path(out).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StoreError(f"{target} exists already")
    needed = plan.nbytes + sum(map(len, assets.values())) + (1 << 20)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if needed > free:
            raise StoreFull(f"{target.parent} has {free} bytes free, the image needs {needed}")
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}")
        try:
            temporary.mkdir()
            manifest, digest = _write(plan, assets, temporary, progress)
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StoreFull(f"{target.parent} is full") from error
        raise StoreError(f"cannot write {target}: {error.strerror}") from error
    return PackedFolder(path=target, manifest=manifest, manifest_digest=digest, assets=tuple(assets))


def _write(
    plan: PackPlan, assets: dict[str, bytes], folder: Path, progress: Progress | None
) -> tuple[Manifest, str]:
    with open(folder / IMAGE_FILE, "wb", buffering=0) as image:

        def write(view: memoryview) -> None:
            done = 0
            while done < len(view):
                done += image.write(view[done:])

        manifest = _hash(plan, progress, write)
        os.fsync(image.fileno())
    encoded = encode_manifest(manifest)
    (folder / MANIFEST_FILE).write_bytes(encoded)
    for name, content in assets.items():
        file = folder / ASSETS_FOLDER / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return manifest, hashlib.sha256(encoded).hexdigest()
