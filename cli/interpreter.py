"""The interpreter that runs other programs of Hypercast, wherever this one was started."""

import sys
from pathlib import Path


def module_command(module: str) -> list[str]:
    """Return the command of a module of this installation.

    The working directory is searched for modules only where this process does, too: an installed
    `hypercast` must not import a folder `cli` or `gateway` of its user.
    """
    searches_here = any(not entry or Path(entry) == Path.cwd() for entry in sys.path)
    return [sys.executable, *([] if searches_here else ["-P"]), "-m", module]
