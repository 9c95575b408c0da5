"""The regions that a node publishes, and the leases of their readers."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rdmacast.bitfield import Bitfield
from rdmacast.errors import CastError, LinkClosed, RegionGone
from rdmacast.server.bitfield_source import BitfieldSource, WholeSource
from rdmacast.transport import RegionSource

logger = logging.getLogger(__name__)


class LeaseHolder(Protocol):
    """The holder of leases; `abort` makes it return them soon."""

    def abort(self, reason: CastError) -> None: ...


class PublishedRegion:
    """A region under its name; `serial` distinguishes it from others of the same name, before or after."""

    def __init__(self, name: str, serial: int, source: RegionSource) -> None:
        self.name = name
        self.serial = serial
        self.source = source
        self._withdrawn = False
        self._leases: dict[LeaseHolder, int] = {}
        self._waiters: set[asyncio.Task[object]] = set()
        self._have = source if isinstance(source, BitfieldSource) else WholeSource(source)
        self._watchers: dict[int, Callable[[], None]] = {}
        self._watch_count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        state = "withdrawn" if self._withdrawn else "published"
        return f"PublishedRegion({self.name}, {state}, {sum(self._leases.values())} leases)"

    @property
    def holders(self) -> tuple[LeaseHolder, ...]:
        return tuple(self._leases)

    def lease(self, holder: LeaseHolder) -> "RegionLease":
        """Return a lease: while it is held the region's withdrawal waits, and its memory stays."""
        return RegionLease(self, holder)

    def add_lease(self, holder: LeaseHolder) -> None:
        self._leases[holder] = self._leases.get(holder, 0) + 1
        self._idle.clear()

    def remove_lease(self, holder: LeaseHolder) -> None:
        self._leases[holder] -= 1
        if not self._leases[holder]:
            del self._leases[holder]
        if not self._leases:
            self._idle.set()

    async def wait_for(self, offset: int, nbytes: int) -> None:
        """Wait until the bytes are present. Raises RegionGone, also when the region is withdrawn."""
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

    def bitfield(self, block_bytes: int) -> Bitfield:
        """Return the bitfield. Raises RegionGone after the withdrawal, ProtocolError for too many blocks."""
        if self._withdrawn:
            raise RegionGone(f"region {self.name} was withdrawn")
        return self._have.bitfield(block_bytes)

    @contextmanager
    def watch(self, changed: Callable[[], None]) -> Iterator[None]:
        """Call `changed` inside when the bitfield may have changed or the region was withdrawn."""
        self._watch_count += 1
        number = self._watch_count
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
class RegionLease:
    """A lease as a context manager; a class, for every read enters one."""

    published: PublishedRegion
    holder: LeaseHolder

    def __enter__(self) -> None:
        self.published.add_lease(self.holder)

    def __exit__(self, *_: object) -> None:
        self.published.remove_lease(self.holder)


class RegionTable:
    """Regions by name."""

    def __init__(self) -> None:
        self._regions: dict[str, PublishedRegion] = {}
        self._serial = 0
        self._waiters_by_name: dict[str, set[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"RegionTable({', '.join(map(repr, self._regions.values()))})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._regions)

    def find(self, name: str) -> PublishedRegion:
        """Return the region of that name. Raises RegionGone."""
        try:
            return self._regions[name]
        except KeyError:
            raise RegionGone(f"no region {name} here") from None

    def publish(self, name: str, source: RegionSource) -> None:
        """Publish a region. Raises ValueError if the name is taken."""
        if name in self._regions:
            raise ValueError(f"region {name} is published already")
        self._serial += 1
        self._regions[name] = PublishedRegion(name, self._serial, source)
        for waiter in self._waiters_by_name.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait_published(self, name: str) -> PublishedRegion:
        """Return the region once it is published."""
        while name not in self._regions:
            waiter = asyncio.get_running_loop().create_future()
            waiters = self._waiters_by_name.setdefault(name, set())
            waiters.add(waiter)
            try:
                await waiter
            finally:
                waiters.discard(waiter)
                if not waiters and self._waiters_by_name.get(name) is waiters:
                    del self._waiters_by_name[name]
        return self._regions[name]

    async def withdraw(self, name: str, drain_s: float) -> None:
        """Remove `name`; returns once no reader uses its memory. Readers are aborted after `drain_s`."""
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
