"""Names that tell which process they belong to, so that what a killed run left can be found and removed."""

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
    """A process; `started`, in ticks since boot, tells it from a later one of its number."""

    pid: int
    started: int

    def name(self, what: str) -> str:
        return f"{PREFIX}-{self.pid}-{self.started}-{what}"

    @property
    def is_alive(self) -> bool:
        try:
            return owner_with(self.pid) == self
        except (FileNotFoundError, ProcessLookupError):
            return False


def owner_with(pid: int) -> Owner:
    """Raises FileNotFoundError or ProcessLookupError if there is none."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Owner(pid, int(after_name[19]))


def owner_of(name: str) -> Owner | None:
    """Whose it is; None if the name is none of ours."""
    found = _NAME.fullmatch(name)
    return Owner(int(found[1]), int(found[2])) if found else None


def is_left(name: str) -> bool:
    """Whether it belongs to a process that has ended."""
    owner = owner_of(name)
    return owner is not None and not owner.is_alive


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A folder that is removed at the end; those of killed runs are removed before."""
    for left in parent.glob(f"{PREFIX}-*"):
        if is_left(left.name) and left.is_dir() and not left.is_symlink() and left.owner() == _user():
            shutil.rmtree(left)
    folder = parent / owner_with(os.getpid()).name("files")
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _user() -> str:
    return Path("/proc/self").owner()
