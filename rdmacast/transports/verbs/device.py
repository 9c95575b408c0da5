"""The seam to an RDMA device: queue pairs that read a peer's memory, and memory that is registered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rdmacast.transports.verbs.address import QueuePairAddress, RemoteMemory


@dataclass(frozen=True, slots=True)
class ReadCompletion:
    """A posted READ that has ended; with a `fault` its bytes are undefined and the queue pair is unusable."""

    id: int
    fault: str | None


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """Registered memory of ours to read into, from `address` (in the device's addresses) on."""

    address: int
    lkey: int


class ReadPort(Protocol):
    """A port that reads a peer's memory; unusable after a fault."""

    def read(self, id: int, local: LocalMemory, remote: RemoteMemory, nbytes: int) -> None:
        """Post a READ; at most `Device.depth` may be pending. Raises DeviceError."""
        ...

    def poll(self) -> Sequence[ReadCompletion]:
        """Return the READs that ended since the last call. Raises DeviceError."""
        ...

    def close(self) -> None:
        """Close; on return the device neither reads nor writes any memory for it any more. Idempotent."""
        ...


class QueuePair(ReadPort, Protocol):
    """A reliable connection."""

    @property
    def address(self) -> QueuePairAddress: ...

    def connect(self, peer: QueuePairAddress) -> None:
        """Connect to the peer's queue pair, for reads both ways. Raises DeviceError."""
        ...


class Registration(Protocol):
    """Memory that the device may use, from `address` on; in the device's addresses from `iova` on."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def iova(self) -> int: ...

    @property
    def lkey(self) -> int: ...

    @property
    def rkey(self) -> int: ...

    def close(self) -> None:
        """Deregister the memory: the device uses it no more. Idempotent."""
        ...


class Registrar(Protocol):
    """A registrar of memory with a device."""

    def register(self, address: int, nbytes: int, *, writable: bool) -> Registration:
        """Register host memory, which must stay mapped while registered. Raises DeviceError."""
        ...

    def register_gpu(self, address: int, nbytes: int) -> Registration:
        """Register GPU memory by its device pointer. Raises DeviceError, which names what is missing."""
        ...


class Device(Registrar, Protocol):
    """An opened port of a device."""

    @property
    def depth(self) -> int:
        """The number of READs that a queue pair may have pending."""
        ...

    @property
    def message_bytes(self) -> int:
        """The longest READ."""
        ...

    def queue_pair(self) -> QueuePair:
        """Make a queue pair. Raises DeviceError."""
        ...

    def close(self) -> None: ...
