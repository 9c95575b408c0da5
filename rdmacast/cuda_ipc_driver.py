"""The seam to CUDA's sharing of memory between the processes of one machine."""

from typing import Protocol


class IpcDriver(Protocol):
    """What is needed of the driver. All methods block, and may be called in any thread.

    A handle names a whole allocation of plain `cudaMalloc`: memory of a pool (cupy's, torch's,
    `cudaMallocAsync`) lies somewhere in a larger allocation, or cannot be shared at all. What was
    exported is not freed while a peer has it open.
    """

    def export(self, base: int) -> bytes:
        """The handle (HANDLE_BYTES) of the allocation that begins at `base`. Raises DeviceError."""
        ...

    def open(self, handle: bytes) -> int:
        """Map a peer's allocation; returns where it begins here. A handle is open once at most.

        Raises DeviceError: for one of this process, of another machine or container, of a GPU that
        this one cannot reach, or that is gone.
        """
        ...

    def close(self, base: int) -> None:
        """Give back what `open` returned. Raises DeviceError."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between opened, device and host memory; done when this returns. Raises DeviceError."""
        ...
