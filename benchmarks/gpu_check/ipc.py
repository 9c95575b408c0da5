"""Another process's arena read in place: opened by its handle, copied to host memory, and closed."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_lender import Lent, lending
from benchmarks.gpu_parts import Row, Task, row
from rdmacast.cuda_ipc_cupy import CupyDriver
from rdmacast.cuda_ipc_driver import IpcDriver
from rdmacast.memory_cuda_ipc import MemoryIpcDriver, MemoryMachine

_ROUNDS = 5
_BLOCK_BYTES = 4 << 20  # as casts move


def check(task: Task) -> list[Row]:
    """On a processor by the fake of the driver."""
    nbytes = (4 << 20) if task.small else (2 << 30)
    content = np.random.default_rng(5).integers(0, 256, nbytes, np.uint8)
    with _lent(task, content) as (lent, driver):
        opens, whole, blocks = [], [], []
        into = np.empty_like(content)
        for _ in range(_ROUNDS):
            began_s = time.perf_counter()
            base = driver.open(lent.handle)
            opens.append(time.perf_counter() - began_s)
            whole.append(_copy(driver, into, base, nbytes))
            blocks.append(_copy(driver, into, base, _BLOCK_BYTES))
            driver.close(base)
    return [
        row(
            "ipc",
            {"bytes": nbytes, "device": task.device},
            ok=bool(np.array_equal(into, content)),
            open_ms=min(opens) * 1e3,
            gb_per_s=nbytes / min(whole) / 1e9,
            blocks_gb_per_s=nbytes / min(blocks) / 1e9,
        )
    ]


def _copy(driver: IpcDriver, into: np.ndarray, base: int, piece_bytes: int) -> float:
    into[:] = 0
    began_s = time.perf_counter()
    for at in range(0, into.nbytes, piece_bytes):
        count = min(piece_bytes, into.nbytes - at)
        driver.copy(into.ctypes.data + at, base + at, count)
    return time.perf_counter() - began_s


@contextmanager
def _lent(task: Task, content: np.ndarray) -> Iterator[tuple[Lent, IpcDriver]]:
    if not task.cuda:
        machine = MemoryMachine()
        owner = MemoryIpcDriver(machine)
        base = owner.allocate(content.tobytes())
        yield Lent(base=base, handle=owner.export(base)), MemoryIpcDriver(machine)
        owner.free(base)
        return
    index = torch.device(task.device).index or 0
    with tempfile.NamedTemporaryFile(prefix="hypercast-gpu-ipc-", dir="/dev/shm") as file:
        file.write(content.data)
        file.flush()
        with lending(index, Path(file.name)) as lent:
            yield lent, CupyDriver(index)
