"""Names that carry their owner process, so that leftovers of a killed run can be found and removed."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hcbed"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-\w+")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process; `started`, in ticks since boot, distinguishes it from a later process with the same id."""

    pid: int
    started: int

    def name(self, what: str) -> str:
        return f"{PREFIX}-{self.pid}-{self.started}-{what}"

    @property
    def is_alive(self) -> bool:
        try:
            return owner_for_pid(self.pid) == self
        except (FileNotFoundError, ProcessLookupError):
            return False


def owner_for_pid(pid: int) -> Owner:
    """Return the owner with this process id. Raises FileNotFoundError or ProcessLookupError."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Owner(pid, int(after_name[19]))


def owner_of(name: str) -> Owner | None:
    """Return the owner that a name carries, or None for a foreign name."""
    found = _NAME.fullmatch(name)
    return Owner(int(found[1]), int(found[2])) if found else None


def is_orphaned(name: str) -> bool:
    """Return whether the name belongs to a process that has ended."""
    owner = owner_of(name)
    return owner is not None and not owner.is_alive


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Create a folder, and remove it at the end; folders of killed runs are removed first."""
    for left in parent.glob(f"{PREFIX}-*"):
        if is_orphaned(left.name) and left.is_dir() and not left.is_symlink() and left.owner() == _user():
            shutil.rmtree(left)
    folder = parent / owner_for_pid(os.getpid()).name("files")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _user() -> str:
    return Path("/proc/self").owner()
