"""Whether this machine's memory holds the images of a scale-out run."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.scaleout.modes import Mode

_GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The copies of an image that exist at once: in host tiers (shared memory), and in all memory."""

    image_bytes: int
    host_copies: int
    copies: int

    @classmethod
    def of(cls, image_bytes: int, nodes: int, sources: Sequence[int], modes: Sequence[Mode]) -> "MemoryNeed":
        """Return the most that these modes need; each node also has a copy on its (emulated) accelerator."""
        own_copies = any(mode.own_copies for mode in modes)
        host_copies = nodes if own_copies else min(nodes, max(sources))
        return cls(image_bytes=image_bytes, host_copies=host_copies, copies=host_copies + nodes)

    def shortfall(self, what: str, advice: str, free_shared_bytes: int, available_bytes: int) -> str:
        """Return what is missing and what to do, or "" if the memory suffices."""
        for kind, copies, free in (
            ("shared memory", self.host_copies, free_shared_bytes),
            ("memory", self.copies, available_bytes),
        ):
            need = copies * self.image_bytes
            if need > free:
                each = f"{copies} x {self.image_bytes / _GIB:.1f} GiB"
                return (
                    f"{what} needs {need / _GIB:.1f} GiB of {kind} ({each}), "
                    f"{free / _GIB:.1f} GiB are free: {advice}"
                )
        return ""


def free_memory(folder: Path = SHARED_MEMORY) -> tuple[int, int]:
    """Return the free bytes of shared memory, and the available bytes of all memory."""
    return shutil.disk_usage(folder).free, int(psutil.virtual_memory().available)
