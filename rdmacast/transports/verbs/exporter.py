"""The serving end of reads by RDMA: a queue pair for each link, and registered memory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from rdmacast.errors import DeviceError, NotShared
from rdmacast.exporter import ExportedRange, ExporterSession
from rdmacast.gpu_source import gpu_pointer
from rdmacast.transports.verbs.address import QueuePairAddress, RemoteMemory
from rdmacast.transports.verbs.device import ServingPair
from rdmacast.transports.verbs.grants import granted, granted_gpu
from rdmacast.transports.verbs.memory import RegisteredMemory
from rdmacast.transports.verbs.node import VerbsNode


class VerbsExporter:
    """An Exporter by the RDMA device of `node`."""

    name = "verbs"

    def __init__(self, node: VerbsNode) -> None:
        self._node = node

    def __repr__(self) -> str:
        return f"VerbsExporter({self._node!r})"

    def session(self) -> ExporterSession:
        """Open a session without a queue pair; the peer's connect request makes it."""
        return _VerbsSession(self._node)


class _VerbsSession:
    """An ExporterSession that owns the queue pair by which one peer reads."""

    def __init__(self, node: VerbsNode) -> None:
        self._node = node
        self._pair: ServingPair | None = None
        self._probe = ExitStack()

    @contextmanager
    def connect(self, payload: bytes) -> Iterator[bytes]:
        """Connect a queue pair to the peer's; it stays until the session is closed."""
        peer = QueuePairAddress.decode(payload)
        with _refusals():
            if self._pair is not None:
                raise DeviceError("this link has its queue pair already")
            self._pair, reply = self._node.connect(peer, self._probe)
        yield reply.encode()

    @contextmanager
    def export(self, exported: ExportedRange) -> Iterator[bytes]:
        """Grant the range, in host or GPU memory, to the peer's queue pair inside."""
        with _refusals():
            if self._pair is None:
                raise DeviceError("this link has no queue pair")
            with _granted(self._node.memory, self._pair, exported) as memory:
                yield memory.encode()

    def close(self) -> None:
        """Close the queue pair: the device reads nothing for it any more."""
        if self._pair is not None:
            self._node.close_pair(self._pair)
        self._probe.close()


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise NotShared for what the device refuses inside."""
    try:
        yield
    except DeviceError as error:
        raise NotShared(f"the peer has no RDMA for this: {error}") from error


def _granted(
    memory: RegisteredMemory, pair: ServingPair, exported: ExportedRange
) -> AbstractContextManager[RemoteMemory]:
    pointer = gpu_pointer(exported.source, exported.offset, exported.nbytes)
    if pointer is not None:
        return granted_gpu(memory, pair, pointer, exported.nbytes)
    return granted(memory, pair, exported.source.view(exported.offset, exported.nbytes))
