"""Weights on disk to load: a checkpoint, its image in a store, and the page cache of both under control."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.random_llama import write_random_llama
from registry.images.codec import decode_manifest
from registry.images.manifest import Manifest
from registry.images.pack import pack_to_folder
from registry.images.store import LocalStore
from registry.messages import ImageRef

LAYER_BYTES = 51_400_000  # of what write_random_llama writes
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The same weights as a checkpoint folder and as an image in a store."""

    checkpoint: Path
    blob: Path
    store: LocalStore
    manifest: Manifest
    ref: ImageRef

    @property
    def safetensors(self) -> Path:
        return self.checkpoint / "model.safetensors"

    @property
    def config(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.checkpoint / "config.json").read_text())
        return found


def prepare(folder: Path, tokenizer: Path, nbytes: int) -> StoredWeights:
    """A float32 Llama of about `nbytes` bytes in `folder`, written unless it is there, and its image."""
    layers = max(1, round(nbytes / LAYER_BYTES))
    folder = folder / f"llama-{layers}"
    checkpoint, packed = folder / "checkpoint", folder / "packed"
    write_random_llama(checkpoint, tokenizer, layers)
    if not packed.is_dir():
        pack_to_folder(checkpoint, packed)
    encoded = (packed / "manifest.json").read_bytes()
    manifest = decode_manifest(encoded)
    store = LocalStore(folder / "store")
    asyncio.run(_put(store, manifest, packed / "image.bin"))
    return StoredWeights(
        checkpoint=checkpoint,
        blob=folder / "store" / "blobs" / manifest.sha256,
        store=store,
        manifest=manifest,
        ref=reference(manifest, encoded),
    )


def reference(manifest: Manifest, encoded: bytes) -> ImageRef:
    """How a gateway names the image to a node; its manifest's digest is not looked at here."""
    return ImageRef(
        image=manifest.sha256, manifest=manifest.sha256, nbytes=manifest.nbytes, manifest_bytes=encoded
    )


def forget(*files: Path) -> None:
    """Have the kernel drop what it cached of the files."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def recall(*files: Path) -> None:
    """Have the kernel cache the files whole."""
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer.data):
                pass


async def _put(store: LocalStore, manifest: Manifest, image: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        with image.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    await store.append(
        manifest.sha256, await store.partial_size(manifest.sha256), chunks(), total=manifest.nbytes
    )
