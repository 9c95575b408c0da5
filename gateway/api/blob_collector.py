"""Collection of blobs that no version uses and no deploy is about to use."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from gateway.core.audit_writer import AuditWriter
from gateway.core.errors import Unavailable
from registry.clock import Clock
from registry.errors import Conflict, RegistryError, StaleEpoch
from registry.held_lease import HeldLease, hold_lease
from registry.images.store import Blobs
from registry.records.function import FunctionVersion
from registry.state import ClusterState

_log = logging.getLogger("hypercast.gateway")

_LEASE = "blobs"
_LEASE_S = 60.0
_MAX_PINS = 64  # of one blob
_RETRY_S = 0.1
_TRIES = 100
_SWEEP_S = 3600.0


def blobs_of(version: FunctionVersion) -> frozenset[str]:
    """Return the digests of all blobs that a version needs."""
    model = {digest for digest in (version.image, version.manifest) if digest is not None}
    return frozenset(model | set(version.assets.values()))


class BlobCollector:
    """The garbage collector of blobs. Registration and collection exclude each other in the whole cluster.

    So a version never names a blob that is being deleted. Blobs of a deleted function are removed at once,
    unless a deploy named them within `grace_s`. Blobs that were never used, and unfinished uploads, are
    removed after `grace_s`. `also_used` returns digests that are in use elsewhere. A sweep leaves blobs alone
    for which `is_kept`: those of the archive, which an emptied or restored Redis does not name.
    """

    def __init__(
        self,
        blobs: Blobs,
        state: ClusterState,
        clock: Clock,
        *,
        grace_s: float,
        lease_s: float = _LEASE_S,
        also_used: Callable[[], Awaitable[frozenset[str]]] | None = None,
        is_kept: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        self._blobs = blobs
        self._state = state
        self._clock = clock
        self._grace_s = grace_s
        self._lease_s = lease_s
        self._also_used = also_used
        self._is_kept = is_kept
        self._pinned: dict[str, list[float]] = {}
        self._unused_since: dict[str, float] = {}
        self._local = asyncio.Lock()

    def pin(self, digests: Iterable[str]) -> None:
        """Pin blobs for one more deploy, for `grace_s` or until it is registered."""
        until = self._clock.monotonic_s() + self._grace_s
        for digest in set(digests):
            pins = self._pinned.setdefault(digest, [])
            pins.append(until)
            del pins[:-_MAX_PINS]  # the latest hold it longest

    def renew_pins(self, digests: Iterable[str]) -> None:
        """Renew the pin of the deploy that uploads or loads these blobs."""
        until = self._clock.monotonic_s() + self._grace_s
        for digest in digests:
            pins = self._pinned.setdefault(digest, [until])
            pins[-1] = until

    def unpin(self, digests: Iterable[str]) -> None:
        """Remove the pin of a deploy that is registered: its version holds the blobs now."""
        for digest in digests:
            pins = self._pinned.get(digest, [])
            if len(pins) > 1:
                pins.pop(0)
            else:
                self._pinned.pop(digest, None)

    def _is_pinned(self, digest: str) -> bool:
        now = self._clock.monotonic_s()
        return any(until > now for until in self._pinned.get(digest, ()))

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[HeldLease]:
        """Hold the cluster's lease for registration and collection.

        Raises Unavailable if it stays taken, or once it is lost: what is done within is cancelled then.
        """
        taken = "another gateway is registering a function: retry"
        async with self._local, AsyncExitStack() as stack:
            for _ in range(_TRIES):
                held = hold_lease(self._state, self._clock, _LEASE, ttl_s=self._lease_s, taken=taken)
                with suppress(Conflict):
                    lease = await stack.enter_async_context(held)
                    break
                await asyncio.sleep(_RETRY_S)
            else:
                raise Unavailable(taken, code="busy")
            try:
                async with lease.bounding():
                    yield lease
            except StaleEpoch as error:
                raise Unavailable(f"{error}: retry", code="busy") from error

    async def collect(self, versions: Iterable[FunctionVersion]) -> list[str]:
        """Delete the blobs of deleted versions; return their digests."""
        candidates = frozenset[str]().union(*map(blobs_of, versions))
        async with self.exclusive() as lease:
            unused = candidates - await self._used()
            free = sorted(digest for digest in unused if not self._is_pinned(digest))
            for digest in free:
                await lease.renew()
                await self._blobs.delete(digest)
        if free:
            _log.info("deleted %d blobs that no version uses", len(free))
        return free

    async def sweep(self) -> list[str]:
        """Delete blobs and unfinished uploads that were unused for `grace_s`; return their digests."""
        async with self.exclusive() as lease:
            used = await self._used()
            now = self._clock.monotonic_s()
            self._pinned = {
                digest: live
                for digest, pins in self._pinned.items()
                if (live := [until for until in pins if until > now])
            }
            blobs = await self._blobs.last_used()
            unused = {digest: used_at for digest, used_at in blobs.items() if digest not in used}
            partials = await self._blobs.partials()
            seen, wall = self._unused_since, self._clock.wall_s()
            self._unused_since = {digest: seen.get(digest, wall) for digest in unused | partials}
            old = [
                digest for digest, used_at in sorted(unused.items()) if self._is_old(digest, used_at, wall)
            ]
            if self._is_kept is not None:
                old = [digest for digest in old if not await self._is_kept(digest)]
            for digest in old:
                await lease.renew()
                await self._blobs.delete(digest)
            abandoned = [
                digest for digest, used_at in sorted(partials.items()) if self._is_old(digest, used_at, wall)
            ]
            dropped = [digest for digest in abandoned if await self._blobs.drop_partial(digest)]
        if old or dropped:
            _log.info("deleted %d unused blobs and %d abandoned uploads", len(old), len(dropped))
        return old + dropped

    def _is_old(self, digest: str, used_at: float | None, wall: float) -> bool:
        """Return whether it was unused for `grace_s`, by the store's time or else since first seen."""
        since = self._unused_since[digest] if used_at is None else used_at
        return wall - since >= self._grace_s and digest not in self._pinned

    async def run(self, audit: AuditWriter) -> None:
        """Sweep every hour until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                if await self.sweep():
                    await audit.end(await audit.begin_own("blob.collect"), 200)
            except (RegistryError, Unavailable) as error:
                _log.warning("sweep of unused blobs failed, retried in an hour: %s", error)

    async def _used(self) -> frozenset[str]:
        others = frozenset[str]() if self._also_used is None else await self._also_used()
        return others.union(*map(blobs_of, await self._state.versions()))
