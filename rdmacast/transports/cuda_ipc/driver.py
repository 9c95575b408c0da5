"""The seam to CUDA IPC: memory shared between the processes of one machine."""

from typing import Protocol


class IpcDriver(Protocol):
    """The driver's operations. All methods block, and may be called in any thread.

    A handle names a whole allocation of plain `cudaMalloc`: memory of a pool (cupy's, torch's,
    `cudaMallocAsync`) lies inside a larger allocation, or cannot be shared at all. An exported allocation
    must not be freed while a peer has it open.
    """

    def export(self, base: int) -> bytes:
        """Return the handle (HANDLE_BYTES) of the allocation that begins at `base`. Raises DeviceError."""
        ...

    def open(self, handle: bytes) -> int:
        """Map a peer's allocation; returns its base address here. A handle is open once at most.

        Raises DeviceError for an allocation of this process, of another machine or container, of a GPU that
        this one cannot reach, or one that was freed.
        """
        ...

    def close(self, base: int) -> None:
        """Unmap what `open` returned. Raises DeviceError."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between opened, device and host memory; finished when this returns. Raises DeviceError."""
        ...
