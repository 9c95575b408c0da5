"""Export a GPU arena to another process: `python -m benchmarks.gpu_check.exporter SOCKET RANK INDEX FILE`.

It fills the arena with the file, and ends with its crew.
"""

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.crew import running_children
from benchmarks.harness.crew_member import serve
from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol, MemberHello
from invoker.memory.cuda_arena import CudaArena
from rdmacast.transports.cuda_ipc.cupy_driver import CupyDriver

_PATIENCE_S = 60.0


class ShowArena(CrewMessage, frozen=True, kw_only=True):
    """Report the arena; answered by ExportedArena."""


class ExportedArena(CrewMessage, frozen=True, kw_only=True):
    """Where the arena begins in its process, and its handle."""

    base: int
    handle: bytes


PROTOCOL = CrewProtocol.of(ShowArena, ExportedArena)


@contextmanager
def exporting(index: int, path: Path) -> Iterator[ExportedArena]:
    """Run such a process while the block runs. Raises CrewError."""
    with running_children("benchmarks.gpu_check.exporter", PROTOCOL, (index, path)) as crew:
        yield crew.ask(ShowArena(), ExportedArena, _PATIENCE_S)[0]


def main(socket: str, rank: int, index: int, path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        arena = CudaArena(index, len(content))
        with memoryview(content) as view:
            arena.fill(arena.reserve(len(view)), 0, view)
    exported = ExportedArena(base=arena.base, handle=CupyDriver(index).export(arena.base))
    serve(socket, MemberHello(rank=rank), PROTOCOL, lambda order: exported)
    arena.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
