"""Folders from which other engines load an image of the host tier: small files, and a link to the image.

    <tier>/models/<node's folder>/<function>-<version>/
        config.json, tokenizer.json, …
        model.safetensors -> ../../../<sha>

An open folder maps its image, so that the link is valid for as long as the folder exists.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from invoker.base.errors import HostTierError, InvalidWork
from invoker.base.paths import is_inside
from invoker.host_tier.mapping import HostMapping, close_if_open
from invoker.host_tier.tier import HostTier

IMAGE_FILE = "model.safetensors"
MAX_FOLDERS = 64
MAX_FILES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """An open folder; `image` is its image's SHA-256, "" without one."""

    path: Path
    image: str
    mapping: HostMapping | None


def _check_image(image: memoryview, name: str) -> None:
    """Raise InvalidWork unless the image is a safetensors file."""
    length = int.from_bytes(image[:8], "little")
    if not 0 < length <= len(image) - 8 or bytes(image[8:9]) != b"{":
        raise InvalidWork(f"the image of {name} was packed by an earlier release: deploy the model again")


class ModelFolders:
    """The open folders of one node, in `root`, which is its own and in the tier's folder. Thread-safe."""

    def __init__(self, tier: HostTier, root: Path) -> None:
        self._tier = tier
        self._root = root
        self._lock = threading.Lock()
        self._open: dict[str, ModelFolder] = {}

    def __repr__(self) -> str:
        return f"<ModelFolders {self._root} {len(self._open)} open>"

    def open(self, name: str, image: str, files: Mapping[str, bytes]) -> Path:
        """Return the folder `name` with these files and the image, if any, which must be in the tier.

        An open folder of that name is returned as it is: a name stands for one version of a function. Raises
        InvalidWork, HostTierError.
        """
        if len(files) > MAX_FILES or not all(map(is_inside, (name, *files))):
            raise InvalidWork(f"the files of {name} are too many, or not all inside its folder")
        with self._lock:
            known = self._open.get(name)
            if known is not None and known.image == image:
                return known.path
            if len(self._open) >= MAX_FOLDERS:
                raise HostTierError(f"this node has {MAX_FOLDERS} folders of models: evict some of them")
            mapping = self._tier.open(image) if image else None
            if mapping is None and image:
                raise HostTierError(f"image {image[:12]} was evicted from the host tier meanwhile")
            try:
                if mapping is not None:
                    _check_image(mapping.view, name)
                path = self._make(name, image, files)
            except BaseException:
                close_if_open(mapping)
                raise
            self._open[name] = ModelFolder(path=path, image=image, mapping=mapping)
            return path

    def close(self, image: str) -> int:
        """Remove the folders of an image, which may be evicted then; return how many there were."""
        with self._lock:
            names = [name for name, folder in self._open.items() if folder.image == image]
            for name in names:
                self._remove(self._open.pop(name))
            return len(names)

    def close_one(self, name: str) -> None:
        """Remove the folder `name`; an unknown one is ignored."""
        with self._lock:
            folder = self._open.pop(name, None)
            if folder is not None:
                self._remove(folder)

    def close_all(self) -> None:
        """Remove all folders. Idempotent."""
        with self._lock:
            for folder in self._open.values():
                self._remove(folder)
            self._open.clear()

    @staticmethod
    def _remove(folder: ModelFolder) -> None:
        shutil.rmtree(folder.path, ignore_errors=True)
        close_if_open(folder.mapping)

    def _make(self, name: str, image: str, files: Mapping[str, bytes]) -> Path:
        try:
            made = Path(tempfile.mkdtemp(prefix=".new-", dir=self._root))
            try:
                for file, content in files.items():
                    target = made / file
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    target.write_bytes(content)
                if image:
                    link = made / IMAGE_FILE
                    link.symlink_to(os.path.relpath(self._tier.directory / image, made))
                path = self._root / name
                shutil.rmtree(path, ignore_errors=True)
                made.rename(path)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
        except OSError as error:
            raise HostTierError(f"cannot make a folder for {name} in {self._root}: {error}") from error
        return path
