"""This process's end of one-sided reads: a device, its registered memory, and what peers read from it."""

import logging
import mmap
import secrets
from contextlib import ExitStack

from rdmacast.errors import DeviceError
from rdmacast.link_rate import LinkRate
from rdmacast.transports.verbs.address import NONCE_BYTES, QueuePairAddress, QueuePairReply, RemoteMemory
from rdmacast.transports.verbs.device import Device, LocalMemory, QueuePair, ServingPair
from rdmacast.transports.verbs.grants import granted
from rdmacast.transports.verbs.memory import RegisteredMemory
from rdmacast.transports.verbs.native import open_device
from rdmacast.transports.verbs.reads import ReadQueue

logger = logging.getLogger(__name__)


class VerbsNode:
    """One for all links of a process. All methods belong to the event loop's thread."""

    def __init__(self, device: Device, name: str, port_rate: LinkRate | None = None) -> None:
        """Own the device; `port_rate` is the speed of its port, if known. Raises DeviceError."""
        self.port_rate = port_rate
        self.device = device
        self.memory = RegisteredMemory(device)
        self.name = name
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._page[:NONCE_BYTES] = self._nonce
        self._broken = ""  # why it is used no more

    def __repr__(self) -> str:
        return f"VerbsNode({self.name}, {self.memory!r})"

    def __enter__(self) -> "VerbsNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self, peer: QueuePairAddress, probe: ExitStack) -> tuple[ServingPair, QueuePairReply]:
        """Connect a new queue pair to the peer's, closed by `close_pair`, then `probe`. Raises DeviceError.

        The peer may read the nonce until `probe` is closed.
        """
        if self._broken:
            raise DeviceError(self._broken)
        pair = self.device.serving_pair()
        try:
            pair.connect(peer)
            nonce = memoryview(self._page)[:NONCE_BYTES]
            reading = probe.enter_context(granted(self.memory, pair, nonce))
        except DeviceError:
            self.close_pair(pair)
            raise
        return pair, QueuePairReply(pair.address, reading, self._nonce)

    def queue_pair(self) -> QueuePair:
        """Make the reading end of a connection. Raises DeviceError."""
        if self._broken:
            raise DeviceError(self._broken)
        return self.device.queue_pair()

    async def read(
        self, reads: ReadQueue, local: LocalMemory, remote: RemoteMemory, into: memoryview
    ) -> None:
        """Read by a queue of this node; what may still be written to afterwards is withdrawn."""
        try:
            await reads.read(local, remote, into.nbytes)
        finally:
            if reads.unsafe is not None:
                self._break(reads.unsafe)
                self.memory.withdraw(local, into)

    def close_pair(self, pair: QueuePair | ServingPair) -> None:
        """Close a queue pair without reads under way; each grant to its peer is revoked by itself."""
        try:
            pair.close()
        except DeviceError as error:
            self._break(error)

    def _break(self, error: DeviceError) -> None:
        """Use the device for no further queue pair."""
        if not self._broken:
            self._broken = f"the RDMA device refused to close a queue pair: {error}"
            logger.error("%r is used no more until this process restarts: %s", self, error)

    def close(self) -> None:
        """Close the device; all queue pairs must have been closed before. Idempotent."""
        self.memory.close()
        self.device.close()


def open_node(wanted: str | None = None, address: str | None = None) -> VerbsNode:
    """Open the best RDMA port, or the `wanted` one (DEVICE or DEVICE:PORT).

    The port with the IP `address` is preferred. Raises NoTransport, which names what is missing.
    """
    device, chosen = open_device(wanted, address)
    logger.info("reads by RDMA go over %s", chosen)
    gbit_s = chosen.port.gbit_s
    return VerbsNode(device, str(chosen), LinkRate(bytes_per_s=gbit_s * 1.25e8) if gbit_s else None)
