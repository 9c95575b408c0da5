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
        """Close; on return the device neither reads nor writes any memory for it any more. Idempotent.

        Raises DeviceError if the device refuses, and may still do so.
        """
        ...


class Connected(Protocol):
    """A reliable connection."""

    @property
    def address(self) -> QueuePairAddress: ...

    def connect(self, peer: QueuePairAddress) -> None:
        """Connect to the peer's queue pair. Raises DeviceError."""
        ...


class QueuePair(Connected, ReadPort, Protocol):
    """The reading end of a connection; the peer can read nothing by it."""


class Registration(Protocol):
    """Memory that the device may use, from `address` on; in the device's addresses from `iova` on.

    No peer can read it by `lkey`: that takes a ReadGrant.
    """

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def iova(self) -> int: ...

    @property
    def lkey(self) -> int: ...

    def close(self) -> None:
        """Deregister the memory: the device uses it no more. Idempotent. Raises DeviceError."""
        ...


class ReadGrant(Protocol):
    """Exactly the memory that the peer of one ServingPair may read."""

    @property
    def memory(self) -> RemoteMemory: ...

    def close(self) -> None:
        """Revoke the key: on return no READ with it is served. Idempotent. Raises DeviceError."""
        ...


class ServingPair(Connected, Protocol):
    """The serving end of a connection: its peer reads what is granted, and only while it is."""

    @property
    def binds(self) -> bool:
        """Whether `bind` works; it costs little, while `register` takes the pages of the range each time."""
        ...

    def bind(self, registration: Registration, address: int, nbytes: int) -> ReadGrant:
        """Grant a range of registered, writable memory. Raises DeviceError."""
        ...

    def register(self, address: int, nbytes: int, *, is_gpu: bool) -> ReadGrant:
        """Grant a range of any memory. Raises DeviceError."""
        ...

    def close(self) -> None:
        """Close; on return no READ of the peer is served. Idempotent. Raises DeviceError like a ReadPort."""
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
        """Make the reading end of a connection. Raises DeviceError."""
        ...

    def serving_pair(self) -> ServingPair:
        """Make the serving end of a connection. Raises DeviceError."""
        ...

    def close(self) -> None: ...
