"""Which blobs may go: those that no version uses and no deploy is about to."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from gateway.contract import Blobs
from gateway.errors import Unavailable
from registry.clock import Clock
from registry.errors import RegistryError
from registry.function import FunctionVersion
from registry.state import ClusterState

_log = logging.getLogger("hypercast.gateway")

_LEASE = "blobs"
_LEASE_S = 60.0
_RETRY_S = 0.1
_TRIES = 100
_SWEEP_S = 3600.0


def blobs_of(version: FunctionVersion) -> frozenset[str]:
    """All blobs that a version needs."""
    model = {digest for digest in (version.image, version.manifest) if digest is not None}
    return frozenset(model | set(version.assets.values()))


class BlobKeeper:
    """Collects blobs. Registering a version and collecting exclude each other in the whole cluster,
    so that a version never names a blob that is being deleted.

    Blobs of a deleted function go at once, unless a deploy named them within `grace_s`. Blobs that
    never came into use, and uploads that were never finished, go after `grace_s`.
    """

    def __init__(
        self, blobs: Blobs, state: ClusterState, clock: Clock, *, holder: str, grace_s: float
    ) -> None:
        self._blobs = blobs
        self._state = state
        self._clock = clock
        self._holder = holder
        self._grace_s = grace_s
        self._pinned: dict[str, list[float]] = {}
        self._unused_since: dict[str, float] = {}
        self._local = asyncio.Lock()

    def pin(self, digests: Iterable[str]) -> None:
        """One more deploy counts on these, for `grace_s` or until it is registered."""
        until = self._clock.monotonic_s() + self._grace_s
        for digest in digests:
            self._pinned.setdefault(digest, []).append(until)

    def hold(self, digests: Iterable[str]) -> None:
        """These are being uploaded or loaded: keep the pin of the deploy that does so from running out."""
        until = self._clock.monotonic_s() + self._grace_s
        for digest in digests:
            pins = self._pinned.setdefault(digest, [until])
            pins[-1] = until

    def unpin(self, digests: Iterable[str]) -> None:
        """A deploy that counted on these is registered: its version keeps them from now on."""
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
    async def exclusive(self) -> AsyncIterator[None]:
        """Nobody else registers or collects meanwhile. Raises Unavailable if others never let go."""
        async with self._local:
            for _ in range(_TRIES):
                if await self._state.acquire_lease(_LEASE, self._holder, _LEASE_S) is not None:
                    break
                await asyncio.sleep(_RETRY_S)
            else:
                raise Unavailable("another gateway is registering a function", code="busy")
            try:
                yield
            finally:
                await asyncio.shield(self._state.release_lease(_LEASE, self._holder))

    async def released(self, versions: Iterable[FunctionVersion]) -> list[str]:
        """Collect the blobs of versions that are gone. Returns what was deleted."""
        candidates = frozenset[str]().union(*map(blobs_of, versions))
        async with self.exclusive():
            unused = candidates - await self._used()
            free = sorted(digest for digest in unused if not self._is_pinned(digest))
            for digest in free:
                await self._blobs.delete(digest)
        if free:
            _log.info("collected %d blobs that no version uses", len(free))
        return free

    async def sweep(self) -> list[str]:
        """Collect what has been unused for long: blobs that no deploy finished with, and uploads that
        nobody went on with."""
        async with self.exclusive():
            used = await self._used()
            now = self._clock.monotonic_s()
            self._pinned = {
                digest: live
                for digest, pins in self._pinned.items()
                if (live := [until for until in pins if until > now])
            }
            blobs = await self._blobs.last_used()
            unused = {digest: told for digest, told in blobs.items() if digest not in used}
            partials = await self._blobs.partials()
            seen, wall = self._unused_since, self._clock.wall_s()
            self._unused_since = {digest: seen.get(digest, wall) for digest in unused | partials}
            old = [digest for digest, told in sorted(unused.items()) if self._is_old(digest, told, wall)]
            for digest in old:
                await self._blobs.delete(digest)
            abandoned = [
                digest for digest, told in sorted(partials.items()) if self._is_old(digest, told, wall)
            ]
            gone = [digest for digest in abandoned if await self._blobs.drop_partial(digest)]
        if old or gone:
            _log.info("swept %d unused blobs and %d abandoned uploads", len(old), len(gone))
        return old + gone

    def _is_old(self, digest: str, told: float | None, wall: float) -> bool:
        """Whether nobody has wanted it for long: since the store's time, else since it was first seen so."""
        since = self._unused_since[digest] if told is None else told
        return wall - since >= self._grace_s and digest not in self._pinned

    async def run(self) -> None:
        """Sweep every hour until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self.sweep()
            except (RegistryError, Unavailable) as error:
                _log.warning("sweep of unused blobs put off: %s", error)

    async def _used(self) -> frozenset[str]:
        return frozenset[str]().union(*map(blobs_of, await self._state.versions()))
