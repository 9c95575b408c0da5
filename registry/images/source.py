"""The folder of a checkpoint: local, or downloaded from a model hub."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from registry.errors import CheckpointError

HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def local_folder(name: str) -> Path | None:
    """Return the folder of that name; None for a hub id. Raises CheckpointError for neither."""
    folder = Path(name).expanduser()
    if folder.is_dir() and name:
        return folder
    if folder.exists() and name:
        raise CheckpointError(f"{name} is a file: name the checkpoint's folder")
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"no such checkpoint folder: {name!r}")
    return None


def checkpoint_from(path_or_hub_id: str | Path) -> Path:
    """Return the folder of a checkpoint, downloaded if it is a hub id. Raises CheckpointError."""
    name = str(path_or_hub_id)
    folder = local_folder(name)
    if folder is not None:
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, LocalEntryNotFoundError) or not isinstance(
            error, HfHubHTTPError | HFValidationError
        ):
            raise CheckpointError(
                f"{name!r} is not a local folder, and the Hugging Face hub cannot be reached from here; "
                "name a local folder"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name!r} is neither a local folder nor could it be downloaded from the hub: {reason}"
        ) from error
