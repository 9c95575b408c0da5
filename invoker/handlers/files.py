"""A handler's private folder: its files, and the files that it writes."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from invoker.base.paths import is_inside
from invoker.handlers.errors import BadHandler

MAX_FILES = 4096


def relative_path(name: str) -> PurePosixPath:
    """Return `name` as a path inside the folder. Raises BadHandler."""
    if not is_inside(name):
        raise BadHandler(f"bad file name {name!r}: it must lie inside the function's folder")
    return PurePosixPath(name)


def make_folder(parent: Path, files: Mapping[str, bytes]) -> Path:
    """Create a new folder under `parent`, readable by its owner only, with `files` in it."""
    if len(files) > MAX_FILES:
        raise BadHandler(f"{len(files)} files are too many (at most {MAX_FILES})")
    paths = {name: relative_path(name) for name in files}
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="handler-", dir=parent))
    except OSError as error:
        raise BadHandler(f"cannot create a scratch folder in {parent}: {error}") from error
    try:
        for name, path in paths.items():
            target = folder / path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The folder is new and private, so there is no link to follow; O_EXCL refuses a duplicate name.
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(files[name])
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise BadHandler(f"cannot write the function's files: {error}") from error
    return folder


def remove_folder(folder: Path) -> None:
    """Remove the folder with everything in it."""
    shutil.rmtree(folder, ignore_errors=True)
