"""The regions that a node publishes, and the leases of those who read them."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rdmacast.errors import CastError, LinkClosed, RegionGone
from rdmacast.have_map import HaveMap
from rdmacast.have_source import HaveSource, WholeSource
from rdmacast.transport import RegionSource

logger = logging.getLogger(__name__)


class Holder(Protocol):
    """Who holds a lease; `abort` makes it give its leases back soon."""

    def abort(self, reason: CastError) -> None: ...


class Published:
    """A region under its name. `serial` tells it from others that had or will have the same name."""

    def __init__(self, name: str, serial: int, source: RegionSource) -> None:
        self.name = name
        self.serial = serial
        self.source = source
        self._withdrawn = False
        self._leases: dict[Holder, int] = {}
        self._waiters: set[asyncio.Task[object]] = set()
        self._have = source if isinstance(source, HaveSource) else WholeSource(source)
        self._watchers: dict[int, Callable[[], None]] = {}
        self._watched = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        state = "withdrawn" if self._withdrawn else "published"
        return f"Published({self.name}, {state}, {sum(self._leases.values())} leases)"

    @property
    def holders(self) -> tuple[Holder, ...]:
        return tuple(self._leases)

    def lease(self, holder: Holder) -> "Lease":
        """While this is held the region's withdrawal does not end, so its memory stays."""
        return Lease(self, holder)

    def leased(self, holder: Holder) -> None:
        self._leases[holder] = self._leases.get(holder, 0) + 1
        self._idle.clear()

    def returned(self, holder: Holder) -> None:
        self._leases[holder] -= 1
        if not self._leases[holder]:
            del self._leases[holder]
        if not self._leases:
            self._idle.set()

    async def wait_for(self, offset: int, nbytes: int) -> None:
        """Wait until the bytes are there. Raises RegionGone, also when the region is withdrawn."""
        task = asyncio.current_task()
        assert task is not None
        self._waiters.add(task)
        try:
            await self.source.wait_for(offset, nbytes)
        except asyncio.CancelledError:
            if not self._withdrawn or task.uncancel():
                raise
        finally:
            self._waiters.discard(task)
        if self._withdrawn:
            raise RegionGone(f"region {self.name} was withdrawn")

    def have_map(self, block_bytes: int) -> HaveMap:
        """Raises RegionGone once the region was withdrawn, ProtocolError where blocks would be too many."""
        if self._withdrawn:
            raise RegionGone(f"region {self.name} was withdrawn")
        return self._have.have_map(block_bytes)

    @contextmanager
    def watch(self, changed: Callable[[], None]) -> Iterator[None]:
        """Inside, `changed` is called when the map may have changed or the region was withdrawn."""
        self._watched += 1
        number = self._watched
        self._watchers[number] = changed
        try:
            with self._have.watch(changed):
                yield
        finally:
            del self._watchers[number]

    def withdraw(self) -> None:
        self._withdrawn = True
        for changed in tuple(self._watchers.values()):
            changed()
        for waiter in self._waiters:
            waiter.cancel()

    async def idle(self) -> None:
        """Return once no lease is left."""
        await self._idle.wait()


@dataclass(frozen=True, slots=True)
class Lease:
    """A context manager; a class, for every read enters one."""

    published: Published
    holder: Holder

    def __enter__(self) -> None:
        self.published.leased(self.holder)

    def __exit__(self, *_: object) -> None:
        self.published.returned(self.holder)


class RegionTable:
    """Regions by name."""

    def __init__(self) -> None:
        self._regions: dict[str, Published] = {}
        self._serial = 0
        self._awaited: dict[str, set[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"RegionTable({', '.join(map(repr, self._regions.values()))})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._regions)

    def find(self, name: str) -> Published:
        """Raises RegionGone."""
        try:
            return self._regions[name]
        except KeyError:
            raise RegionGone(f"no region {name} here") from None

    def publish(self, name: str, source: RegionSource) -> None:
        """Raises ValueError if the name is taken."""
        if name in self._regions:
            raise ValueError(f"region {name} is published already")
        self._serial += 1
        self._regions[name] = Published(name, self._serial, source)
        for waiter in self._awaited.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def appeared(self, name: str) -> Published:
        """The region, once it is published."""
        while name not in self._regions:
            waiter = asyncio.get_running_loop().create_future()
            waiters = self._awaited.setdefault(name, set())
            waiters.add(waiter)
            try:
                await waiter
            finally:
                waiters.discard(waiter)
                if not waiters and self._awaited.get(name) is waiters:
                    del self._awaited[name]
        return self._regions[name]

    async def withdraw(self, name: str, drain_s: float) -> None:
        """Forget `name`, return once nobody reads its memory; who does after `drain_s` is aborted."""
        published = self._regions.pop(name, None)
        if published is None:
            return
        published.withdraw()
        try:
            async with asyncio.timeout(drain_s):
                await published.idle()
        except TimeoutError:
            for holder in published.holders:
                logger.warning("closing a link that held region %s for %g s", name, drain_s)
                holder.abort(LinkClosed(f"region {name} was held for too long after its withdrawal"))
            await published.idle()
