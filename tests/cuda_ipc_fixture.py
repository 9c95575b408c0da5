"""GPU memory for tests of CUDA IPC: that of another process where there is a GPU, and a fake everywhere.

`python -m tests.cuda_ipc_fixture FILE` is that process: it lends the file's content until its input ends.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

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
    command = [sys.executable, "-m", "tests.cuda_ipc_fixture", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdin is not None
        base, handle = owner.stdout.readline().split()
        lender = GpuLender(_Told(bytes.fromhex(handle)))  # type: ignore[arg-type]
        with lender.added(int(base), len(content)):
            yield lender, int(base), CupyDriver(0)
        owner.stdin.close()
        assert owner.wait() == 0


def main(path: Path) -> None:
    import cupy
    import numpy as np

    content = np.frombuffer(path.read_bytes(), np.uint8)
    runtime, driver = cupy.cuda.runtime, CupyDriver(0)
    with cupy.cuda.Device(0):
        base = int(runtime.malloc(content.nbytes))  # not of cupy's pool
    driver.copy(base, content.ctypes.data, content.nbytes)
    print(base, driver.export(base).hex(), flush=True)
    sys.stdin.read()
    with cupy.cuda.Device(0):
        runtime.free(base)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
