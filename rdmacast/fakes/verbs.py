"""The fake of the RDMA seam: devices of one process that copy memory, with faults on demand."""

import ctypes
import itertools
from collections.abc import Sequence

from rdmacast.errors import DeviceError
from rdmacast.transports.verbs.address import QueuePairAddress, RemoteMemory
from rdmacast.transports.verbs.device import LocalMemory, ReadCompletion, Registration


class MemoryFabric:
    """The network of MemoryDevices; queue pairs whose numbers are `unreachable` do not answer."""

    def __init__(self, first_number: int = 17) -> None:
        self.numbers = itertools.count(first_number)
        self.keys = itertools.count(1000)
        self.pairs: dict[int, MemoryPair] = {}
        self.memory: dict[int, MemoryRegistration] = {}  # by lkey
        self.grants: dict[int, MemoryGrant] = {}  # by rkey
        self.unreachable: set[int] = set()
        self.held = False  # nothing that was posted ends
        self.refuses_pairs = False  # to be closed
        self.refuses_memory = False  # to be deregistered or revoked

    def cut(self) -> None:
        """Make all current queue pairs unreachable."""
        self.unreachable |= set(self.pairs)


class MemoryDevice:
    """A Device whose READs end a few at each poll, in order.

    It registers at most `limit_bytes`; `with_gpu` accepts host memory as a GPU's. Without `windows` each
    grant is a registration.
    """

    def __init__(
        self,
        fabric: MemoryFabric,
        *,
        limit_bytes: int | None = None,
        with_gpu: bool = False,
        windows: bool = True,
    ) -> None:
        self.fabric = fabric
        self.windows = windows
        self._with_gpu = with_gpu
        self._limit_bytes = limit_bytes
        self.closed = False

    @property
    def depth(self) -> int:
        return 4

    @property
    def message_bytes(self) -> int:
        return 50_000

    def queue_pair(self) -> "MemoryPair":
        pair = MemoryPair(self, self.depth)
        self.fabric.pairs[pair.address.number] = pair
        return pair

    serving_pair = queue_pair

    def register(self, address: int, nbytes: int, *, writable: bool) -> "MemoryRegistration":
        if self._limit_bytes is not None and nbytes > self._limit_bytes:
            raise DeviceError(f"cannot register {nbytes} bytes of memory")
        return MemoryRegistration(self.fabric, address, nbytes, writable)

    def register_gpu(self, address: int, nbytes: int) -> "MemoryRegistration":
        if not self._with_gpu:
            raise DeviceError("no GPU here")
        return MemoryRegistration(self.fabric, address, nbytes, writable=True)

    def close(self) -> None:
        self.closed = True


class MemoryRegistration:
    """A Registration whose device addresses differ from the processor's, as with a dma-buf."""

    def __init__(self, fabric: MemoryFabric, address: int, nbytes: int, writable: bool) -> None:
        self._fabric = fabric
        self.address = address
        self.nbytes = nbytes
        self.writable = writable
        self.iova = address % 4096
        self.lkey = next(fabric.keys)
        fabric.memory[self.lkey] = self

    def at(self, iova: int, nbytes: int) -> int | None:
        """Return the processor's address of a device range; None outside the registration."""
        inside = self.iova <= iova and iova + nbytes <= self.iova + self.nbytes
        return self.address + iova - self.iova if inside else None

    def close(self) -> None:
        if self._fabric.refuses_memory:
            raise DeviceError("cannot deregister memory")
        self._fabric.memory.pop(self.lkey, None)


class MemoryGrant:
    """A ReadGrant to the peer of `pair`."""

    def __init__(self, fabric: MemoryFabric, pair: "MemoryPair", address: int, nbytes: int) -> None:
        self._fabric = fabric
        self.pair = pair
        self.nbytes = nbytes
        self.memory = RemoteMemory(address % 4096, next(fabric.keys))
        self._address = address
        fabric.grants[self.memory.rkey] = self

    def at(self, pair: "MemoryPair", iova: int, nbytes: int) -> int | None:
        """Return the processor's address of a device range; None outside the grant or for another pair."""
        start = self.memory.address
        inside = pair is self.pair and start <= iova and iova + nbytes <= start + self.nbytes
        return self._address + iova - start if inside else None

    def close(self) -> None:
        if self._fabric.refuses_memory:
            raise DeviceError("cannot revoke memory")
        self._fabric.grants.pop(self.memory.rkey, None)


class MemoryPair:
    """A QueuePair and a ServingPair."""

    def __init__(self, device: MemoryDevice, depth: int) -> None:
        self._device = device
        self._fabric = fabric = device.fabric
        self._depth = depth
        self._posted: list[tuple[int, LocalMemory, RemoteMemory, int]] = []
        self._peer: QueuePairAddress | None = None
        number = next(fabric.numbers)
        self.address = QueuePairAddress(
            number=number, first_psn=number, lid=0, mtu_bytes=4096, reads=16, gid=bytes(15) + b"\1"
        )

    def __repr__(self) -> str:
        return f"MemoryPair({self.address.number}, {len(self._posted)} posted)"

    def connect(self, peer: QueuePairAddress) -> None:
        self._peer = peer

    def read(self, id: int, local: LocalMemory, remote: RemoteMemory, nbytes: int) -> None:
        if len(self._posted) >= self._depth:
            raise DeviceError("too many READs are under way")
        self._posted.append((id, local, remote, nbytes))

    def poll(self) -> Sequence[ReadCompletion]:
        if self._fabric.held:
            return ()
        now, self._posted = self._posted[:2], self._posted[2:]
        return [ReadCompletion(id, self._copy(local, remote, nbytes)) for id, local, remote, nbytes in now]

    @property
    def binds(self) -> bool:
        return self._device.windows

    def bind(self, registration: Registration, address: int, nbytes: int) -> MemoryGrant:
        known = self._fabric.memory.get(registration.lkey)
        start = registration.iova + address - registration.address
        if not self.binds or known is None or not known.writable or known.at(start, nbytes) is None:
            raise DeviceError("no window can be bound to that memory")
        return MemoryGrant(self._fabric, self, address, nbytes)

    def register(self, address: int, nbytes: int, *, is_gpu: bool) -> MemoryGrant:
        if is_gpu:
            self._device.register_gpu(address, nbytes).close()
        else:
            self._device.register(address, nbytes, writable=False).close()
        return MemoryGrant(self._fabric, self, address, nbytes)

    def close(self) -> None:
        if self._fabric.refuses_pairs:
            raise DeviceError("cannot destroy a queue pair")
        self._posted.clear()
        self._fabric.pairs.pop(self.address.number, None)

    def _copy(self, local: LocalMemory, remote: RemoteMemory, nbytes: int) -> str | None:
        fabric = self._fabric
        peer = fabric.pairs.get(self._peer.number) if self._peer is not None else None
        if peer is None or peer.address.number in fabric.unreachable or peer._peer != self.address:
            return "the peer does not answer"
        into, grant = fabric.memory.get(local.lkey), fabric.grants.get(remote.rkey)
        start = grant.at(peer, remote.address, nbytes) if grant is not None else None
        if start is None:
            return "the peer refuses access to that memory"
        target = into.at(local.address, nbytes) if into is not None and into.writable else None
        if target is None:
            return "our own memory is not registered"
        ctypes.memmove(target, start, nbytes)
        return None
