"""Reads another process's arena in place: opened by its handle, copied to host memory, and closed."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_check.exporter import ExportedArena, exporting
from benchmarks.gpu_check.parts import PartTask, Row, row
from rdmacast.fakes.cuda_ipc import MemoryIpcDriver, MemoryMachine
from rdmacast.transports.cuda_ipc.cupy_driver import CupyDriver
from rdmacast.transports.cuda_ipc.driver import IpcDriver

_ROUNDS = 5
_BLOCK_BYTES = 4 << 20  # the block size of casts


def check(task: PartTask) -> list[Row]:
    """Time opens and copies; on a CPU with the driver's fake."""
    nbytes = (4 << 20) if task.small else (2 << 30)
    content = np.random.default_rng(5).integers(0, 256, nbytes, np.uint8)
    with _exported(task, content) as (exported, driver):
        opens, whole, blocks = [], [], []
        into = np.empty_like(content)
        for _ in range(_ROUNDS):
            started_s = time.perf_counter()
            base = driver.open(exported.handle)
            opens.append(time.perf_counter() - started_s)
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
    started_s = time.perf_counter()
    for at in range(0, into.nbytes, piece_bytes):
        count = min(piece_bytes, into.nbytes - at)
        driver.copy(into.ctypes.data + at, base + at, count)
    return time.perf_counter() - started_s


@contextmanager
def _exported(task: PartTask, content: np.ndarray) -> Iterator[tuple[ExportedArena, IpcDriver]]:
    if not task.cuda:
        machine = MemoryMachine()
        owner = MemoryIpcDriver(machine)
        base = owner.allocate(content.tobytes())
        yield ExportedArena(base=base, handle=owner.export(base)), MemoryIpcDriver(machine)
        owner.free(base)
        return
    index = torch.device(task.device).index or 0
    with tempfile.NamedTemporaryFile(prefix="hypercast-gpu-ipc-", dir="/dev/shm") as file:
        file.write(content.data)
        file.flush()
        with exporting(index, Path(file.name)) as exported:
            yield exported, CupyDriver(index)
