"""Feeds the directory: a snapshot of the shared state, then every change; anew when cut off."""

import asyncio
import logging
import random
from collections.abc import Iterable
from contextlib import aclosing

from gateway.directory import GRACE_S, Directory
from gateway.wakeup import Wakeup
from registry.cast import CastRecord, CastStatus
from registry.clock import Clock
from registry.errors import InvalidRecord, NotFound, StateUnavailable
from registry.state import ClusterState

log = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.05
_LAST_WAIT_S = 0.5
_HELD_UP_S = 1.0
_LEARNT_MEMBERS = 4096  # of as many parts of casts this gateway learns before it is ready


class DirectorySync:
    """`ready` is set once the first snapshot is loaded; `alive` says whether the feed is followed now.

    While the feed is cut off no lease runs out: what is known goes on serving, since a node whose
    channel is up is there, and one whose channel broke is out of routing anyway.
    """

    def __init__(self, state: ClusterState, directory: Directory, changes: Wakeup, clock: Clock) -> None:
        self.ready = asyncio.Event()
        self.alive = False
        self._state = state
        self._directory = directory
        self._changes = changes
        self._clock = clock
        self._random = random.Random()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._expire(), name="directory leases")
            group.create_task(self._follow(), name="directory feed")

    async def _follow(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                snapshot = await self._state.snapshot()
                await self._hear_last_words(snapshot.casts)
                await self._learn_links(snapshot.casts)
                self._directory.load(snapshot, self._clock.monotonic_s())
                self.alive, wait_s = True, _FIRST_WAIT_S
                self.ready.set()
                self._changes.notify_soon()
                async with aclosing(self._state.watch(snapshot.cursor)) as feed:  # type: ignore[type-var]
                    async for cursor, change in feed:
                        self._directory.cursor = cursor
                        self._directory.apply(change, self._clock.monotonic_s())
                        self._changes.notify_soon()
                        if self._directory.incomplete:
                            log.info("a node is back that had lapsed here: taking a new snapshot")
                            break
            except NotFound as error:
                log.info("the feed was cut off (%s): taking a new snapshot", error)
            except StateUnavailable as error:
                if self.alive:
                    log.warning("the shared state is away: %s", error)
                self.alive = False
                if self._directory.cut_off_s is None:
                    self._directory.cut_off_s = self._clock.monotonic_s()
                self._changes.notify_soon()
                await asyncio.sleep(wait_s * self._random.uniform(0.5, 1.0))
                wait_s = min(_LAST_WAIT_S, wait_s * 2)

    async def _hear_last_words(self, records: Iterable[CastRecord]) -> None:
        """Of the casts whose end is awaited: what was said while the feed was not followed. It comes before
        the nodes that are gone by now: what these said counts."""
        ends = self._directory.cast_ends
        ends.missed(records)
        for cast_id in ends.running:
            for status in await self._cast(cast_id):
                for progress in [one for one in status.progress if one.is_final]:
                    self._directory.links.told(progress)
                    ends.ended(progress, self._clock.monotonic_s())

    async def _learn_links(self, records: Iterable[CastRecord]) -> None:
        """Of the latest casts that ended before this gateway followed the feed: what they showed of links."""
        links, latest, members = self._directory.links, list[CastRecord](), 0
        for record in sorted(records, key=lambda one: one.started_at, reverse=True):
            members += len(record.members)
            if members > _LEARNT_MEMBERS:
                break
            if not links.counted(record.cast_id):
                latest.append(record)
        for record in reversed(latest):
            for status in await self._cast(record.cast_id):
                links.heard(status)

    async def _cast(self, cast_id: str) -> list[CastStatus]:
        """The cast and what is told of it; nothing if it cannot be read."""
        try:
            return await self._state.casts(cast_id)
        except InvalidRecord as error:
            log.warning("what nodes told of cast %s cannot be read: %s", cast_id, error)
            return []

    async def _expire(self) -> None:
        while True:
            due = self._directory.next_expiry() if self.alive else None
            try:
                async with asyncio.timeout(None if due is None else due - self._clock.monotonic_s()):
                    await self._changes.wait()
            except TimeoutError:
                now = self._clock.monotonic_s()
                if due is not None and now - due > _HELD_UP_S:
                    # This process was held up: the heartbeats of meanwhile lie unread.
                    self._directory.postpone(now + GRACE_S)
                elif self.alive and self._directory.expire(now):
                    self._changes.notify_soon()
