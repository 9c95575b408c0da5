"""GPU memory for tests of CUDA IPC: that of another process where there is a GPU, and a fake everywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from benchmarks.gpu_lender import lending
from rdmacast.cuda_ipc_cupy import CupyDriver
from rdmacast.cuda_ipc_driver import IpcDriver
from rdmacast.cuda_ipc_lender import GpuLender
from rdmacast.errors import DeviceError
from rdmacast.memory_cuda_ipc import MemoryIpcDriver, MemoryMachine


@cache
def why_no_gpu() -> str:
    """Empty where cupy finds a GPU."""
    try:
        CupyDriver(0)
    except DeviceError as error:
        return str(error)
    return ""


@contextmanager
def lent_by_fake(content: bytes) -> Iterator[tuple[GpuLender, int, IpcDriver]]:
    """The lender, where its memory with `content` begins, and a reader's driver. No rule was broken."""
    machine = MemoryMachine()
    owner, reader = MemoryIpcDriver(machine), MemoryIpcDriver(machine)
    base = owner.allocate(content)
    lender = GpuLender(owner)
    with lender.added(base, len(content)):
        yield lender, base, reader
    owner.free(base)
    assert not machine.faults and not reader.opened


class _Told:
    """The export of another process's allocation."""

    def __init__(self, handle: bytes) -> None:
        self._handle = handle

    def export(self, base: int) -> bytes:
        return self._handle


@contextmanager
def lent_by_process(content: bytes, path: Path) -> Iterator[tuple[GpuLender, int, IpcDriver]]:
    """The same on a real GPU: a process cannot open what is its own."""
    with lending(0, path) as lent:
        lender = GpuLender(_Told(lent.handle))  # type: ignore[arg-type]
        with lender.added(lent.base, len(content)):
            yield lender, lent.base, CupyDriver(0)
