"""Weights on disk: a checkpoint, its image in a store, and control over their page cache."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.random_llama import LAYER_BYTES, write_random_llama
from registry.images.codec import decode_manifest
from registry.images.manifest import Manifest
from registry.images.pack import IMAGE_FILE, pack_to_folder
from registry.images.store import LocalStore
from registry.messages.images import ImageRef

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
    """Write a float32 Llama of about `nbytes` bytes to `folder` unless it exists, and its image."""
    layers = max(1, round(nbytes / LAYER_BYTES))
    return asyncio.run(stored(folder / f"llama-{layers}", tokenizer, layers))


async def stored(folder: Path, tokenizer: Path, layers: int) -> StoredWeights:
    """Write a float32 Llama of `layers` layers to `folder` unless it exists, and its image in a store."""
    checkpoint, packed = folder / "checkpoint", folder / "packed"
    write_random_llama(checkpoint, tokenizer, layers)
    if not packed.is_dir():
        pack_to_folder(checkpoint, packed)
    encoded = (packed / "manifest.json").read_bytes()
    manifest = decode_manifest(encoded)
    store = LocalStore(folder / "store")
    await _put(store, manifest, packed / IMAGE_FILE)
    return StoredWeights(
        checkpoint=checkpoint,
        blob=folder / "store" / "blobs" / manifest.sha256,
        store=store,
        manifest=manifest,
        ref=ImageRef(
            image=manifest.sha256,
            manifest=hashlib.sha256(encoded).hexdigest(),
            nbytes=manifest.nbytes,
            manifest_bytes=encoded,
        ),
    )


def drop_from_cache(*files: Path) -> None:
    """Drop the files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_into_cache(*files: Path) -> None:
    """Read the files into the page cache."""
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
