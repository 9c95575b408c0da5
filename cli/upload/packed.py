"""The folder that `hypercast pack` writes, as the plan of an image."""

from pathlib import Path

from cli.errors import DeployError
from registry.images.architectures import read_config
from registry.images.codec import decode_manifest
from registry.images.dtypes import dominant_dtype
from registry.images.layout import Layout
from registry.images.manifest import Manifest
from registry.images.pack import ASSETS_FOLDER, IMAGE_FILE, MANIFEST_FILE


def is_packed(folder: Path) -> bool:
    """Return whether a folder was written by `hypercast pack`."""
    return (folder / IMAGE_FILE).is_file() and (folder / MANIFEST_FILE).is_file()


class PackedPlan:
    """An ImagePlan that reads an image which is packed already."""

    def __init__(self, path: Path, manifest: Manifest, config: dict[str, object]) -> None:
        self.path, self.manifest, self.config = path, manifest, config
        self.assets_folder = path / ASSETS_FOLDER
        self.architecture, self.model_type = manifest.architecture, manifest.model_type
        self.tied_head, self.num_layers = manifest.tied_head, manifest.num_layers
        self.nbytes = manifest.nbytes
        self.layout = Layout(tensors=manifest.tensors, layers=manifest.layers, nbytes=manifest.nbytes)
        self.dtype = dominant_dtype((tensor.dtype, tensor.nbytes) for tensor in manifest.tensors)

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
    return PackedPlan(folder, manifest, read_config(folder / ASSETS_FOLDER))
