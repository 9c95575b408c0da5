"""Publishes this node's state to the registry: heartbeats, and changes promptly."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from registry.errors import StateUnavailable
from registry.records.cast import CastProgress
from registry.records.instance import TRANSITIONS, InstanceRecord
from registry.records.node import NodeRecord
from registry.records.usage import InstanceInterval, LostCall
from registry.state import State

COALESCE_S = 0.05
BACKOFF_S = (0.1, 0.2, 0.5)
LEDGER_BATCH = 50  # records, one round trip each, before other changes are published
MAX_PENDING_CASTS = 64  # casts whose last progress is kept while the registry is unavailable

log = logging.getLogger("invoker.publisher")


class LedgerOutbox(Protocol):
    """Ledger records, oldest first, kept until acknowledged."""

    def next_record(self) -> tuple[int, InstanceInterval | LostCall] | None: ...

    def acknowledge(self, number: int) -> None: ...


class Publisher:
    """One task that writes all changes of this node to the registry.

    While the registry is unavailable it retries, and then publishes everything, since the last writes may be
    lost. `run` raises StaleEpoch if another process has taken the node's id.
    """

    def __init__(self, state: State, epoch: int, lease_s: float, outbox: LedgerOutbox) -> None:
        self._state = state
        self._epoch = epoch
        self._lease_s = lease_s
        self._pending: dict[str, InstanceRecord] = {}
        self._live: dict[str, InstanceRecord] = {}
        self._casts: dict[str, CastProgress] = {}
        self._outbox = outbox
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._node_dirty = True
        self._heartbeat_s = 0.0
        self._closing = False
        self.registered = asyncio.Event()

    def __repr__(self) -> str:
        state = "registered" if self.registered.is_set() else "not registered"
        return f"<Publisher {state}, {len(self._pending)} instances pending>"

    def node_changed(self) -> None:
        """Schedule the node's record for publication."""
        self._node_dirty = True
        self._changed.set()

    def instance_changed(self, record: InstanceRecord) -> None:
        """Schedule an instance's record for publication; the last of several changes counts."""
        # Moved to the end, so that records are published in the order of their last change.
        self._pending.pop(record.instance_id, None)
        self._pending[record.instance_id] = record
        previous = self._live.get(record.instance_id)
        if previous is None or previous.state is not record.state:
            self._urgent.set()  # requests wait for state changes, not for progress
        self._changed.set()

    def cast_changed(self, progress: CastProgress) -> None:
        """Schedule a cast's progress for publication; the last of several reports counts."""
        self._casts.pop(progress.cast_id, None)
        self._casts[progress.cast_id] = progress
        if len(self._casts) > MAX_PENDING_CASTS:
            del self._casts[next(iter(self._casts))]
        self._changed.set()

    def ledger_changed(self) -> None:
        """Schedule unsent ledger records."""
        self._changed.set()

    def close(self) -> None:
        """End `run` after it has published everything once more, if the registry is available."""
        self._closing = True
        self._node_dirty = True
        self._changed.set()
        self._urgent.set()

    async def run(self, node: Callable[[], NodeRecord]) -> None:
        """Publish until closed; `node` returns the node's current record. Raises StaleEpoch."""
        failures = 0
        while True:
            self._changed.clear()
            self._urgent.clear()
            closing = self._closing
            try:
                await self._publish(node)
            except StateUnavailable as error:
                if closing:
                    return
                if not failures:
                    log.warning("registry unavailable, serving on: %s", error)
                self._pending = {**self._live, **self._pending}
                self._node_dirty = True
                wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
                failures += 1
                await asyncio.sleep(wait_s)  # even if there are new changes
                continue
            if failures:
                log.info("registry available again after %d retries", failures)
                failures = 0
            if closing:
                return
            await self._pause(max(0.0, self._heartbeat_s - time.monotonic()))

    async def _publish(self, node: Callable[[], NodeRecord]) -> None:
        await self._publish_changes(node)
        while await self._send_records():
            await self._publish_changes(node)

    async def _publish_changes(self, node: Callable[[], NodeRecord]) -> None:
        # The node first: readers ignore instances of an unknown node.
        if self._node_dirty or time.monotonic() >= self._heartbeat_s:
            await self._publish_node(node)
        while self._pending:
            # The arena's free bytes must not be published after the instance that uses it.
            if self._node_dirty:
                await self._publish_node(node)
            instance_id = next(iter(self._pending))
            record = self._pending.pop(instance_id)
            try:
                await self._state.put_instance(record, self._epoch)
            except StateUnavailable:
                self._pending.setdefault(instance_id, record)
                raise
            if TRANSITIONS[record.state]:
                self._live[instance_id] = record
            else:
                self._live.pop(instance_id, None)
        while self._casts:
            cast_id = next(iter(self._casts))
            progress = self._casts.pop(cast_id)
            try:
                await self._state.put_cast_progress(progress)
            except StateUnavailable:
                self._casts.setdefault(cast_id, progress)
                raise

    async def _send_records(self) -> bool:
        """Send a batch of ledger records, at most until the next heartbeat.

        Return whether more may be left.
        """
        for _ in range(LEDGER_BATCH):
            unsent = self._outbox.next_record()
            if unsent is None:
                return False
            number, record = unsent
            if isinstance(record, InstanceInterval):
                await self._state.add_interval(record)
            else:
                await self._state.add_lost_call(record)
            self._outbox.acknowledge(number)
            if time.monotonic() >= self._heartbeat_s:
                break
        return True

    async def _publish_node(self, node: Callable[[], NodeRecord]) -> None:
        self._node_dirty = False
        self._heartbeat_s = time.monotonic() + self._lease_s / 3
        if not await self._state.put_node(node(), self._lease_s):
            self._pending = {**self._live, **self._pending}  # the registry has lost them
        self.registered.set()

    async def _pause(self, seconds: float) -> None:
        """Wait for a change, at most `seconds`; then up to COALESCE_S for further ones, unless urgent."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(COALESCE_S):
                await self._urgent.wait()
