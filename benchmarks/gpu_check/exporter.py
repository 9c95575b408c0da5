"""Export a GPU arena to another process: `python -m benchmarks.gpu_check.exporter INDEX FILE`.

It fills the arena with the file, prints its base address and handle, and ends with its input.
"""

import mmap
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from invoker.memory.cuda_arena import CudaArena
from rdmacast.transports.cuda_ipc.cupy_driver import CupyDriver


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedArena:
    """Where the arena begins in its process, and its handle."""

    base: int
    handle: bytes


@contextmanager
def exporting(index: int, path: Path) -> Iterator[ExportedArena]:
    """Such a process, for as long as the context lasts. Raises RuntimeError where it ends early."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.exporter", str(index), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lender:
        assert lender.stdin is not None and lender.stdout is not None
        try:
            base, _, handle = lender.stdout.readline().partition(" ")
            if not handle:
                raise RuntimeError(f"the process that lends ended with {lender.wait()}")
            yield ExportedArena(base=int(base), handle=bytes.fromhex(handle))
        finally:
            lender.stdin.close()
            lender.wait()


def main(index: int, path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        arena = CudaArena(index, len(content))
        with memoryview(content) as view:
            arena.copy_in(arena.reserve(len(view)), 0, view)
    print(arena.base, CupyDriver(index).export(arena.base).hex(), flush=True)
    sys.stdin.read()
    arena.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
