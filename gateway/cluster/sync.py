"""Keeps the state cache up to date: a snapshot of the shared state, then every change of its feed."""

import asyncio
import logging
import random
from collections.abc import Iterable
from contextlib import aclosing

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.state_cache import GRACE_S, ClusterStateCache
from registry.clock import Clock
from registry.errors import InvalidRecord, NotFound, StateUnavailable
from registry.records.cast import CastRecord, CastStatus
from registry.state import ClusterState

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 0.5
_MAX_LAG_S = 1.0
_MAX_LOADED_PARTS = 4096  # parts of casts of which link rates are loaded before the gateway is ready


class ClusterStateSync:
    """The feed follower: `ready` is set after the first snapshot, `alive` while the feed is followed.

    No lease expires while the feed is disconnected: a node with an open channel is alive, and one with a
    broken channel is out of routing anyway.
    """

    def __init__(
        self, state: ClusterState, state_cache: ClusterStateCache, changes: ChangeCondition, clock: Clock
    ) -> None:
        self.ready = asyncio.Event()
        self.alive = False
        self._state = state
        self._state_cache = state_cache
        self._changes = changes
        self._clock = clock
        self._random = random.Random()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._expire(), name="cluster state leases")
            group.create_task(self._follow(), name="cluster state feed")

    async def _follow(self) -> None:
        wait_s = _FIRST_BACKOFF_S
        while True:
            try:
                snapshot = await self._state.snapshot()
                await self._read_final_progress(snapshot.casts)
                await self._load_link_rates(snapshot.casts)
                self._state_cache.load(snapshot, self._clock.monotonic_s())
                self.alive, wait_s = True, _FIRST_BACKOFF_S
                self.ready.set()
                self._changes.notify_soon()
                async with aclosing(self._state.watch(snapshot.cursor)) as feed:  # type: ignore[type-var]
                    async for cursor, change in feed:
                        self._state_cache.cursor = cursor
                        self._state_cache.apply(change, self._clock.monotonic_s())
                        self._changes.notify_soon()
                        if self._state_cache.needs_snapshot:
                            log.info("change feed: an expired node is back, taking a new snapshot")
                            break
            except NotFound as error:
                log.info("change feed: cut off (%s), taking a new snapshot", error)
            except (StateUnavailable, InvalidRecord) as error:  # the latter may be of a later release
                if self.alive:
                    log.warning("shared state unavailable: %s", error)
                self.alive = False
                if self._state_cache.disconnected_s is None:
                    self._state_cache.disconnected_s = self._clock.monotonic_s()
                self._changes.notify_soon()
                await asyncio.sleep(wait_s * self._random.uniform(0.5, 1.0))
                wait_s = min(_MAX_BACKOFF_S, wait_s * 2)

    async def _read_final_progress(self, records: Iterable[CastRecord]) -> None:
        """Apply the final progress of running casts that was published while the feed was not followed.

        This happens before lost nodes are removed, since what they published counts.
        """
        tracker = self._state_cache.cast_tracker
        tracker.resync(records)
        for cast_id in tracker.running:
            for status in await self._cast(cast_id):
                for progress in [one for one in status.progress if one.is_final]:
                    self._state_cache.link_rates.on_part_ended(progress)
                    tracker.on_part_ended(progress, self._clock.monotonic_s())

    async def _load_link_rates(self, records: Iterable[CastRecord]) -> None:
        """Load the link rates of the latest casts that ended before this gateway followed the feed."""
        links, latest, members = self._state_cache.link_rates, list[CastRecord](), 0
        for record in sorted(records, key=lambda one: one.started_at, reverse=True):
            members += len(record.members)
            if members > _MAX_LOADED_PARTS:
                break
            if not links.is_counted(record.cast_id):
                latest.append(record)
        for record in reversed(latest):
            for status in await self._cast(record.cast_id):
                links.on_status(status)

    async def _cast(self, cast_id: str) -> list[CastStatus]:
        """Return the cast with its progress, empty if it cannot be decoded."""
        try:
            return await self._state.casts(cast_id)
        except InvalidRecord as error:
            log.warning("cast %s: progress not readable: %s", cast_id, error)
            return []

    async def _expire(self) -> None:
        while True:
            due = self._state_cache.next_expiry() if self.alive else None
            try:
                async with asyncio.timeout(None if due is None else due - self._clock.monotonic_s()):
                    await self._changes.wait()
            except TimeoutError:
                now = self._clock.monotonic_s()
                if due is not None and now - due > _MAX_LAG_S:
                    # This process stalled: heartbeats of that time are still unread.
                    self._state_cache.postpone(now + GRACE_S)
                elif self.alive and self._state_cache.expire(now):
                    self._changes.notify_soon()
