"""The folder that `hypercast pack` writes, as the plan of an image."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cli.errors import DeployError
from registry.images.architectures import read_config
from registry.images.codec import decode_manifest
from registry.images.dtypes import dominant_dtype
from registry.images.layout import Layout
from registry.images.manifest import Manifest
from registry.images.pack import ASSETS_FOLDER, IMAGE_FILE, MANIFEST_FILE
from registry.images.plan import CHUNK_BYTES


def is_packed(folder: Path) -> bool:
    """Return whether a folder was written by `hypercast pack`."""
    return (folder / IMAGE_FILE).is_file() and (folder / MANIFEST_FILE).is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPlan:
    """An ImagePlan that reads an image which is packed already."""

    path: Path
    manifest: Manifest
    config: dict[str, object]

    @property
    def assets_folder(self) -> Path:
        return self.path / ASSETS_FOLDER

    @property
    def architecture(self) -> str:
        return self.manifest.architecture

    @property
    def model_type(self) -> str:
        return self.manifest.model_type

    @property
    def tied_head(self) -> bool:
        return self.manifest.tied_head

    @property
    def num_layers(self) -> int:
        return self.manifest.num_layers

    @property
    def dtype(self) -> str:
        return dominant_dtype((tensor.dtype, tensor.nbytes) for tensor in self.manifest.tensors)

    @property
    def layout(self) -> Layout:
        return Layout(tensors=self.manifest.tensors, layers=self.manifest.layers, nbytes=self.manifest.nbytes)

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with `[offset, offset + len(into))` of the image. Raises DeployError."""
        try:
            with (self.path / IMAGE_FILE).open("rb", buffering=0) as file:
                file.seek(offset)
                done = 0
                while done < len(into):
                    count = file.readinto(into[done:])
                    if not count:
                        raise DeployError(f"{self.path / IMAGE_FILE} ends before byte {self.nbytes}")
                    done += count
        except OSError as error:
            raise DeployError(f"cannot read {self.path / IMAGE_FILE}: {error.strerror}") from error

    def chunks(self, offset: int = 0) -> Iterator[memoryview]:
        """Yield the image from `offset` on; each view is valid until the next."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(0, self.nbytes - offset))))
        while offset < self.nbytes:
            view = buffer[: min(CHUNK_BYTES, self.nbytes - offset)]
            self.read_into(offset, view)
            yield view
            offset += len(view)


def packed_plan(folder: Path) -> PackedPlan:
    """Return the plan of a packed folder. Raises ImageError, DeployError."""
    try:
        encoded = (folder / MANIFEST_FILE).read_bytes()
        size = (folder / IMAGE_FILE).stat().st_size
    except OSError as error:
        raise DeployError(f"cannot read {folder}: {error.strerror}") from error
    manifest = decode_manifest(encoded)
    if size != manifest.nbytes:
        raise DeployError(
            f"{folder / IMAGE_FILE} has {size} bytes, but {MANIFEST_FILE} describes {manifest.nbytes}"
        )
    return PackedPlan(path=folder, manifest=manifest, config=read_config(folder / ASSETS_FOLDER))
