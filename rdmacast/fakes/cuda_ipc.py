"""The fake of the CUDA IPC seam: "GPU memory" of one process, by CUDA's rules."""

import ctypes
import itertools
import mmap
import os
import secrets

from rdmacast.errors import DeviceError
from rdmacast.transports.cuda_ipc.memory import HANDLE_BYTES
from rdmacast.transports.verbs.memory import address_of


class _FakeAllocation:
    def __init__(self, owner: "MemoryIpcDriver", nbytes: int) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.handle = secrets.token_bytes(HANDLE_BYTES)
        self.file = os.memfd_create("gpu")
        os.ftruncate(self.file, nbytes)
        self.mapping = mmap.mmap(self.file, nbytes)

    @property
    def base(self) -> int:
        return address_of(memoryview(self.mapping))


class MemoryMachine:
    """The state that the "processes" of one machine share; `faults` are broken rules that no call refused."""

    def __init__(self) -> None:
        self.allocations: dict[bytes, _FakeAllocation] = {}  # by handle
        self.faults: list[str] = []
        self.openers: list[tuple[bytes, int]] = []  # what is open now: its handle, and where
        self.opens = 0  # how often anything was opened
        self.processes = itertools.count(1)


class MemoryIpcDriver:
    """An IpcDriver, of one "process" of its machine."""

    def __init__(self, machine: MemoryMachine) -> None:
        self._machine = machine
        self._number = next(machine.processes)
        self._opened: dict[int, tuple[bytes, mmap.mmap]] = {}  # by where it is here

    @property
    def opened(self) -> int:
        return len(self._opened)

    def allocate(self, content: bytes) -> int:
        made = _FakeAllocation(self, len(content))
        made.mapping[:] = content
        self._machine.allocations[made.handle] = made
        return made.base

    def free(self, base: int) -> None:
        made = self._find(base)
        if any(handle == made.handle for handle, _ in self._machine.openers):
            self._machine.faults.append(f"{made.nbytes} bytes were freed while a peer had them open")
        del self._machine.allocations[made.handle]
        made.mapping.close()
        os.close(made.file)

    def export(self, base: int) -> bytes:
        return self._find(base).handle

    def open(self, handle: bytes) -> int:
        made = self._machine.allocations.get(handle)
        if made is None:
            raise DeviceError("there is no such allocation on this machine")
        if made.owner is self:
            raise DeviceError("the allocation is this process's own")
        if any(open_handle == handle for open_handle, _ in self._opened.values()):
            raise DeviceError("the allocation is open already")
        mapping = mmap.mmap(made.file, made.nbytes)
        base = address_of(memoryview(mapping))
        self._opened[base] = handle, mapping
        self._machine.openers.append((handle, base))
        self._machine.opens += 1
        return base

    def close(self, base: int) -> None:
        if base not in self._opened:
            raise DeviceError("nothing is open there")
        handle, mapping = self._opened.pop(base)
        self._machine.openers.remove((handle, base))
        mapping.close()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        if not any(
            base <= source and source + nbytes <= base + len(mapping)
            for base, (_, mapping) in self._opened.items()
        ):
            raise DeviceError("the source is not open")
        ctypes.memmove(target, source, nbytes)

    def _find(self, base: int) -> _FakeAllocation:
        for made in self._machine.allocations.values():
            if made.owner is self and made.base == base:
                return made
        raise DeviceError("no allocation of this process begins there")
