"""Tells the shared state about this node: heartbeats, and changes at once."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from registry.cast import CastProgress
from registry.errors import StateUnavailable
from registry.instance import TRANSITIONS, InstanceRecord
from registry.node import NodeRecord
from registry.state import State
from registry.usage import InstanceInterval, LostCall

COALESCE_S = 0.05
BACKOFF_S = (0.1, 0.2, 0.5)
DUES_AT_ONCE = 50  # a round trip each: then whatever else is new comes first again
MOST_CASTS = 64  # of which the last word waits for a state that does not answer

log = logging.getLogger("invoker.publisher")


class Dues(Protocol):
    """Records that the ledger is to have, oldest first; they stay until they are paid."""

    def first_due(self) -> tuple[int, InstanceInterval | LostCall] | None: ...

    def paid(self, due: int) -> None: ...


class Publisher:
    """One task that writes; everything else only says that something changed.

    While the state does not answer, the node
    goes on and the publisher tries again; then it publishes everything, since what was written last may
    be lost. `run` raises StaleEpoch when another process has taken the node's id.
    """

    def __init__(self, state: State, epoch: int, lease_s: float, dues: Dues) -> None:
        self._state = state
        self._epoch = epoch
        self._lease_s = lease_s
        self._pending: dict[str, InstanceRecord] = {}
        self._live: dict[str, InstanceRecord] = {}
        self._casts: dict[str, CastProgress] = {}
        self._dues = dues
        self._wanted = asyncio.Event()
        self._urgent = asyncio.Event()
        self._node_dirty = True
        self._heartbeat_s = 0.0
        self._closing = False
        self.registered = asyncio.Event()

    def __repr__(self) -> str:
        state = "registered" if self.registered.is_set() else "not registered"
        return f"<Publisher {state}, {len(self._pending)} instances to tell of>"

    def node_changed(self) -> None:
        """Have the node's record published soon."""
        self._node_dirty = True
        self._wanted.set()

    def instance_changed(self, record: InstanceRecord) -> None:
        """Have an instance's record published soon; of several changes the last one counts."""
        # A new place at the end, so that records go out in the order of their last change.
        self._pending.pop(record.instance_id, None)
        self._pending[record.instance_id] = record
        known = self._live.get(record.instance_id)
        if known is None or known.state is not record.state:
            self._urgent.set()  # requests wait for this one; progress alone can wait a moment
        self._wanted.set()

    def cast_changed(self, progress: CastProgress) -> None:
        """Have it published soon how far a cast has come here; of several words the last one counts."""
        self._casts.pop(progress.cast_id, None)
        self._casts[progress.cast_id] = progress
        if len(self._casts) > MOST_CASTS:
            del self._casts[next(iter(self._casts))]
        self._wanted.set()

    def record_due(self) -> None:
        """Have what is due written to the ledger soon."""
        self._wanted.set()

    def close(self) -> None:
        """Let `run` end after it has told everything once more, if the state answers."""
        self._closing = True
        self._node_dirty = True
        self._wanted.set()
        self._urgent.set()

    async def run(self, node: Callable[[], NodeRecord]) -> None:
        """Publish until closed; `node` builds the node's record anew. Raises StaleEpoch."""
        failures = 0
        while True:
            self._wanted.clear()
            self._urgent.clear()
            closing = self._closing
            try:
                await self._publish(node)
            except StateUnavailable as error:
                if closing:
                    return
                if not failures:
                    log.warning("the shared state does not answer, serving on: %s", error)
                self._pending = {**self._live, **self._pending}
                self._node_dirty = True
                wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
                failures += 1
                await asyncio.sleep(wait_s)  # a change is no reason to try earlier
                continue
            if failures:
                log.info("the shared state answers again after %d tries", failures)
                failures = 0
            if closing:
                return
            await self._pause(max(0.0, self._heartbeat_s - time.monotonic()))

    async def _publish(self, node: Callable[[], NodeRecord]) -> None:
        await self._tell(node)
        while await self._pay():
            await self._tell(node)

    async def _tell(self, node: Callable[[], NodeRecord]) -> None:
        # The node first: an instance of an unknown node would make no sense to a reader.
        if self._node_dirty or time.monotonic() >= self._heartbeat_s:
            await self._publish_node(node)
        while self._pending:
            if self._node_dirty:  # what an instance took of the arena is told no later than that it did
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

    async def _pay(self) -> bool:
        """Pay some dues, until a heartbeat is due at most; whether there are more."""
        for _ in range(DUES_AT_ONCE):
            due = self._dues.first_due()
            if due is None:
                return False
            number, owed = due
            if isinstance(owed, InstanceInterval):
                await self._state.add_interval(owed)
            else:
                await self._state.add_lost_call(owed)
            self._dues.paid(number)
            if time.monotonic() >= self._heartbeat_s:
                break
        return True

    async def _publish_node(self, node: Callable[[], NodeRecord]) -> None:
        self._node_dirty = False
        self._heartbeat_s = time.monotonic() + self._lease_s / 3
        if not await self._state.put_node(node(), self._lease_s):
            self._pending = {**self._live, **self._pending}  # it knows nothing of them (any more)
        self.registered.set()

    async def _pause(self, seconds: float) -> None:
        """Wait for a change, at most `seconds`; then a moment more, so that changes go out together."""
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        except TimeoutError:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(COALESCE_S):
                await self._urgent.wait()
