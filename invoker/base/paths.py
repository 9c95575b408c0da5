"""File names that come from outside."""

from pathlib import PurePosixPath


def is_inside(name: str) -> bool:
    """Return whether `name`, relative to a folder, is a path inside it."""
    path = PurePosixPath(name)
    return bool(path.parts) and not ("\0" in name or "\\" in name or path.is_absolute() or ".." in path.parts)
