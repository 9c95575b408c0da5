"""The bound on open connections, in all and from one address, and what many of them leave in memory."""

import asyncio
import ctypes
import resource
from collections.abc import Callable

NO_LIMIT = 1 << 30
# Descriptors for Redis, nodes, files and the listener, which clients must not take.
RESERVED_DESCRIPTORS = 256
# An address may hold this many times the connections that are free for others: 4 of 5 by itself. A share
# rather than a number, since all clients behind a proxy have its address.
_SHARE_OF_FREE = 4
_MANY = 256


class ConnectionLimiter:
    """A count of the open connections, with a limit in all and a share for each address.

    Calls `on_ebb` each time that many connections were open and three of four are closed. `is_closing` is set
    when the server shuts down: connections close once idle then, new ones included.
    """

    def __init__(self, most: int, on_ebb: Callable[[], None] = lambda: None) -> None:
        self.open = 0
        self.is_closing = False
        self._closed = asyncio.Event()  # set when none is open, cleared by `wait_closed`
        self._peak = 0  # since the last ebb
        self._most = most
        self._on_ebb = on_ebb
        self._addresses: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<ConnectionLimiter {self.open} of {self._most}, {len(self._addresses)} addresses>"

    def admit(self, address: str) -> bool:
        """Count a connection, and return True; False if there are too many."""
        own, free = self._addresses.get(address, 0), self._most - self.open
        if free <= 0 or own >= _SHARE_OF_FREE * free:
            return False
        self.open += 1
        self._peak = max(self._peak, self.open)
        self._addresses[address] = own + 1
        return True

    def release(self, address: str) -> None:
        """Take a closed connection off the count."""
        self.open -= 1
        if (own := self._addresses.pop(address)) > 1:
            self._addresses[address] = own - 1
        if not self.open:
            self._closed.set()
        if self._peak >= _MANY and self.open <= self._peak // 4:
            self._peak = self.open
            self._on_ebb()

    async def wait_closed(self) -> None:
        """Wait until no connection is open."""
        if self.open:
            self._closed.clear()
            await self._closed.wait()


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps it where a small block lies above it on the heap."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit(wanted: int) -> int:
    """Return how many connections this process accepts: `wanted`, or what its descriptors allow."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, descriptors - RESERVED_DESCRIPTORS))
