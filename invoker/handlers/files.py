"""A handler's private folder: its files, and whatever it writes."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from invoker.handlers.errors import BadHandler

MAX_FILES = 4096


def relative_path(name: str) -> PurePosixPath:
    """`name` as a path that stays inside the folder, else BadHandler."""
    path = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or path.is_absolute() or ".." in path.parts or not path.parts:
        raise BadHandler(f"bad file name {name!r}: it must lie inside the function's folder")
    return path


def make_folder(parent: Path, files: Mapping[str, bytes]) -> Path:
    """A fresh folder under `parent`, readable by its owner only, with `files` in it."""
    if len(files) > MAX_FILES:
        raise BadHandler(f"{len(files)} files are too many (at most {MAX_FILES})")
    paths = {name: relative_path(name) for name in files}
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="handler-", dir=parent))
    except OSError as error:
        raise BadHandler(f"no scratch folder in {parent}: {error}") from error
    try:
        for name, path in paths.items():
            target = folder / path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The folder is new and ours, so there is no link to follow; O_EXCL refuses a name given twice.
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(files[name])
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise BadHandler(f"the function's files cannot be written: {error}") from error
    return folder


def remove_folder(folder: Path) -> None:
    """Remove the folder and all that the handler left in it."""
    shutil.rmtree(folder, ignore_errors=True)
