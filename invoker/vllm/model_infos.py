"""What vLLM has found out about its model classes, kept for the next servers of a node.

A server of a class that vLLM has not seen starts a further process to inspect it, which imports vLLM again:
seconds. vLLM caches the result as JSON, with a hash of the class's module, in the server's own folder.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from invoker.vllm.arguments import CACHE

MAX_BYTES = 64 << 10  # of a file
MAX_FILES = 256
_FOLDER = "modelinfos"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}\.json")


class ModelInfos:
    """The kept files; all methods take a server's folder, and run in a thread."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def write_into(self, scratch: Path) -> None:
        """Write the files where a new server looks for them."""
        folder = scratch / CACHE / _FOLDER
        folder.mkdir(parents=True)
        for name, data in self._kept.copy().items():
            (folder / name).write_bytes(data)

    def keep(self, scratch: Path) -> None:
        """Keep the files that a server has written, within bounds; others are left."""
        for name, data in _read(scratch / CACHE / _FOLDER):
            if name in self._kept or len(self._kept) < MAX_FILES:
                self._kept[name] = data


def _read(folder: Path) -> Iterator[tuple[str, bytes]]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder))[: 2 * MAX_FILES]
    except OSError:
        return
    for name in filter(_NAME.fullmatch, names):
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            data = os.read(descriptor, MAX_BYTES + 1) if is_file else b""
        finally:
            os.close(descriptor)
        if 0 < len(data) <= MAX_BYTES:
            yield name, data
