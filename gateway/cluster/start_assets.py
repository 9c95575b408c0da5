"""Assets of a start: the manifest and the small files of a version, cached after the first read."""

import asyncio
from collections import OrderedDict

from rdmacast.cast.record import CastPlan
from registry.images.store import Blobs
from registry.messages.images import ImageHolder, ImageRef
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask, FunctionVersion

_MANIFEST_LIMIT = 64 << 20
_FILE_LIMIT = 64 << 20
_CACHE_BYTES = 128 << 20
# Files that the native engine needs besides the image; tokenizers are sent for grammars only.
_MODEL_FILES = ("config.json", "generation_config.json", "preprocessor_config.json")


class StartAssets:
    """A read-through cache of blobs; concurrent reads of one blob are shared."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._locks: dict[str, asyncio.Lock] = {}

    def __repr__(self) -> str:
        return f"<StartAssets {len(self._held)} blobs, {self._bytes} bytes>"

    async def files(self, version: FunctionVersion) -> dict[str, bytes]:
        """Return the files that a node needs, by name. Raises NotFound, ImageError."""
        whole = version.task is FunctionTask.HANDLER or version.engine is not EngineKind.NATIVE
        names = version.assets if whole else _MODEL_FILES
        return {
            name: await self._read(version.assets[name], _FILE_LIMIT)
            for name in names
            if name in version.assets
        }

    async def file(self, version: FunctionVersion, name: str) -> bytes:
        """Return one file. Raises NotFound, ImageError."""
        return await self._read(version.assets[name], _FILE_LIMIT)

    async def image_ref(
        self, version: FunctionVersion, holders: tuple[ImageHolder, ...], cast: CastPlan | None = None
    ) -> ImageRef | None:
        """Return the image with its manifest, None for a version without one. Raises NotFound, ImageError."""
        if version.image is None or version.manifest is None:
            return None
        return ImageRef(
            image=version.image,
            manifest=version.manifest,
            nbytes=version.image_bytes,
            holders=holders,
            manifest_bytes=await self._read(version.manifest, _MANIFEST_LIMIT),
            cast=cast,
        )

    async def _read(self, digest: str, limit: int) -> bytes:
        lock = self._locks.setdefault(digest, asyncio.Lock())
        try:
            async with lock:
                data = self._held.get(digest)
                if data is None:
                    data = await self._blobs.read(digest, limit=limit)
                    self._held[digest] = data
                    self._bytes += len(data)
                self._held.move_to_end(digest)
        finally:
            if not lock.locked():
                self._locks.pop(digest, None)
        while self._bytes > _CACHE_BYTES and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._bytes -= len(dropped)
        return data
