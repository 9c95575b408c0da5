"""The seam to an RDMA device: queue pairs that read a peer's memory, and memory that is registered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rdmacast.verbs_address import QueuePairAddress, RemoteMemory


@dataclass(frozen=True, slots=True)
class Completion:
    """A posted READ has ended; with a `fault` nothing is known of its bytes and the queue pair is useless."""

    id: int
    fault: str | None


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """Registered memory of ours to read into, from `address` (as the device counts it) on."""

    address: int
    lkey: int


class ReadPort(Protocol):
    """Reads a peer's memory. Never used again after a fault."""

    def read(self, id: int, local: LocalMemory, remote: RemoteMemory, nbytes: int) -> None:
        """Post a READ; at most `Device.depth` are under way at once. Raises DeviceError."""
        ...

    def poll(self) -> Sequence[Completion]:
        """What has ended since the last time. Raises DeviceError."""
        ...

    def close(self) -> None:
        """On return the device neither reads nor writes any memory for it any more. Idempotent."""
        ...


class QueuePair(ReadPort, Protocol):
    """A reliable connection."""

    @property
    def address(self) -> QueuePairAddress: ...

    def connect(self, peer: QueuePairAddress) -> None:
        """Be ready to answer and to ask. Raises DeviceError."""
        ...


class Registration(Protocol):
    """Memory that the device may use, from `address` on; the device counts it from `iova` on."""

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
        """The device uses the memory no more. Idempotent."""
        ...


class Registrar(Protocol):
    """Makes memory known to a device."""

    def register(self, address: int, nbytes: int, *, writable: bool) -> Registration:
        """Host memory, which must stay mapped until the registration is closed. Raises DeviceError."""
        ...

    def register_gpu(self, address: int, nbytes: int) -> Registration:
        """Memory of a GPU, by its device pointer. Raises DeviceError, saying what is missing."""
        ...


class Device(Registrar, Protocol):
    """An opened port of a device."""

    @property
    def depth(self) -> int:
        """READs that a queue pair may have under way."""
        ...

    @property
    def message_bytes(self) -> int:
        """The longest READ."""
        ...

    def queue_pair(self) -> QueuePair:
        """Raises DeviceError."""
        ...

    def close(self) -> None: ...
