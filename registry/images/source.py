"""The folder of a checkpoint: local, or one commit of a repository on a model hub."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from registry.errors import CheckpointError
from registry.images.remote import open_folder, reading, url_of

HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
_HUB_NAME = re.compile(
    r"(?P<id>[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?)"
    r"(@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,127}))?"
)
_MODELS = "models/"  # may precede the id in hf://
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint's folder. From a hub also its id there, and the commit that the folder is of.

    From a store `url` is its address; `folder` then behaves as a path, and is none of this machine.
    """

    folder: Path
    hub_id: str = ""
    commit: str = ""
    url: str = ""


def local_folder(name: str) -> Path | None:
    """Return the folder of that name; None for a hub id or a URL. Raises CheckpointError for neither."""
    if url_of(name) is not None:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir() and name:
        return folder
    if folder.exists() and name:
        raise CheckpointError(f"{name} is a file: name the checkpoint's folder")
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(f"no such checkpoint folder: {name!r}")
    return None


def at_revision(name: str, revision: str | None) -> str:
    """Return a hub id with the revision. Raises CheckpointError for others, or if it has one already."""
    if revision is None:
        return name
    scheme, hub_id = url_of(name) or ("hf", name)
    if scheme != "hf" or local_folder(name) is not None or "@" in name:
        raise CheckpointError(f"{name} is no hub id without a revision: --revision is for one")
    pinned = f"{name}@{revision}"
    if not _HUB_NAME.fullmatch(f"{hub_id.removeprefix(_MODELS)}@{revision}"):
        raise CheckpointError(f"{revision!r} is no revision: give a branch, a tag or a commit")
    return pinned


def checkpoint_from(path_or_hub_name: str | Path) -> Checkpoint:
    """Return a checkpoint; `ID` or `ID@REVISION` of the hub is downloaded, a URL is read in place.

    A branch or tag is resolved to its commit once, and all files are of that commit. Raises CheckpointError.
    """
    name = str(path_or_hub_name)
    if (url := url_of(name)) is not None:
        return _hub_url(name, url[1]) if url[0] == "hf" else _store_url(name, *url)
    folder = local_folder(name)
    if folder is not None:
        return Checkpoint(folder=folder)
    found = _HUB_NAME.fullmatch(name)
    assert found is not None
    try:
        folder = Path(snapshot_download(found["id"], revision=found["revision"], allow_patterns=HUB_PATTERNS))
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
    # The library names a snapshot's folder by its commit.
    if not _COMMIT.fullmatch(folder.name):
        raise CheckpointError(f"{name!r}: the hub named no commit, so that its files cannot be pinned")
    return Checkpoint(folder=folder, hub_id=found["id"], commit=folder.name)


def _hub_url(name: str, rest: str) -> Checkpoint:
    """Return a commit of a hub's repository, of which nothing is downloaded. Raises CheckpointError."""
    found = _HUB_NAME.fullmatch(rest.removeprefix(_MODELS))
    if found is None:
        raise CheckpointError(f"{name} is not hf://ORG/NAME[@REVISION]")
    with reading(name):
        commit = HfApi().model_info(found["id"], revision=found["revision"]).sha
    if commit is None or not _COMMIT.fullmatch(commit):
        raise CheckpointError(f"{name}: the hub named no commit, so that its files cannot be pinned")
    return Checkpoint(folder=open_folder("hf", f"{found['id']}@{commit}"), hub_id=found["id"], commit=commit)


def _store_url(name: str, scheme: str, rest: str) -> Checkpoint:
    folder = open_folder(scheme, rest)
    with reading(name):
        there = (folder / "config.json").is_file()
    if not there:
        raise CheckpointError(f"{name} has no config.json, or does not exist")
    return Checkpoint(folder=folder, url=name)
