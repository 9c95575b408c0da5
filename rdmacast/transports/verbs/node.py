"""This process's end of one-sided reads: a device, its registered memory, and what peers read from it."""

import logging
import mmap
import secrets
from contextlib import ExitStack

from rdmacast.errors import DeviceError
from rdmacast.link_rate import LinkRate
from rdmacast.transports.verbs.address import NONCE_BYTES, QueuePairAddress, QueuePairReply
from rdmacast.transports.verbs.device import Device, QueuePair
from rdmacast.transports.verbs.memory import RegisteredMemory
from rdmacast.transports.verbs.native import open_device

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
        self._stack = ExitStack()
        try:
            self._probe = self._stack.enter_context(self.memory.remote(memoryview(self._page)))
        except DeviceError:
            device.close()
            raise

    def __repr__(self) -> str:
        return f"VerbsNode({self.name}, {self.memory!r})"

    def __enter__(self) -> "VerbsNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self, peer: QueuePairAddress) -> tuple[QueuePair, QueuePairReply]:
        """Connect a new queue pair to the peer's; the caller closes it. Raises DeviceError."""
        pair = self.device.queue_pair()
        try:
            pair.connect(peer)
        except DeviceError:
            pair.close()
            raise
        return pair, QueuePairReply(pair.address, self._probe, self._nonce)

    def close(self) -> None:
        """Close the device; all queue pairs must have been closed before. Idempotent."""
        self._stack.close()
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
