"""What the controller tells of live serving: a record a function version, published when it changes."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gateway.directory import Directory, VersionKey
from gateway.live_policy import LiveDecision
from gateway.wakeup import Wakeup
from registry.change import LiveChanged
from registry.clock import Clock
from registry.errors import RegistryError
from registry.live import Live, LivePipeline, LiveRecord, LiveSwitch
from registry.state import ClusterState

log = logging.getLogger(__name__)

TTL_S = 10.0  # of pipelines, if nobody renews them
_RENEW_S = TTL_S / 3
_RETRY_S = 0.5
_DECISION_TTL_S = 3600.0  # of a decision, where there are no pipelines


@dataclass(slots=True)
class _Entry:
    decision: LiveDecision
    at: float
    pipelines: dict[str, LivePipeline] = field(default_factory=dict)


class LiveBoard:
    """Changes count here at once, and elsewhere as soon as `run` has published them. Without the lease
    (`epoch` gives None) nothing is told."""

    def __init__(
        self,
        state: ClusterState,
        directory: Directory,
        changes: Wakeup,
        clock: Clock,
        epoch: Callable[[], int | None],
    ) -> None:
        self._state = state
        self._directory = directory
        self._changes = changes
        self._clock = clock
        self._epoch = epoch
        self._entries: dict[VersionKey, _Entry] = {}
        self._serial = 0
        self._dirty: set[VersionKey] = set()
        self._some = asyncio.Event()

    def __repr__(self) -> str:
        return (
            f"<LiveBoard {[(str(key), [*entry.pipelines.values()]) for key, entry in self._entries.items()]}>"
        )

    def pipeline(self, key: VersionKey, pipeline_id: str) -> LivePipeline | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.pipelines.get(pipeline_id)

    def decided(self, key: VersionKey, decision: LiveDecision) -> None:
        entry = self._entry(key)
        if decision == entry.decision:
            return
        log.info("%s: %s", key, decision.reason)
        entry.decision, entry.at = decision, self._clock.wall_s()
        self._tell(key)

    def put(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """It takes calls, in the place of an earlier epoch of it."""
        self._entry(key).pipelines[pipeline.pipeline_id] = pipeline
        self._tell(key)

    def switched(self, key: VersionKey, pipeline_id: str, switch: LiveSwitch) -> None:
        pipeline = self.pipeline(key, pipeline_id)
        if pipeline is not None:
            self.put(key, replace(pipeline, switched=(*pipeline.switched, switch)))

    def drop(self, key: VersionKey, pipeline_id: str) -> None:
        """It takes no calls any more."""
        entry = self._entries.get(key)
        if entry is not None and entry.pipelines.pop(pipeline_id, None) is not None:
            self._tell(key)

    def adopt(self, record: LiveRecord) -> None:
        """Go on from what an earlier controller told."""
        entry = self._entry(VersionKey(record.function, record.version))
        entry.decision = LiveDecision(way=record.way, reason=record.reason)
        entry.at = record.at
        entry.pipelines = {one.pipeline_id: one for one in record.pipelines}
        self._tell(VersionKey(record.function, record.version))

    def forget(self) -> None:
        """Another controller has told since: what this one knows is no more."""
        self._entries.clear()

    async def run(self) -> None:
        """Publish until cancelled."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + _RENEW_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(renew_at):
                    await self._some.wait()
            self._some.clear()
            if loop.time() >= renew_at:  # however much changes meanwhile
                renew_at = loop.time() + _RENEW_S
                self._forget_old()
                self._dirty |= {key for key, entry in self._entries.items() if entry.pipelines}
            keys, self._dirty = self._dirty, set()
            for key in keys:
                if not await self._publish(key):
                    self._dirty.add(key)
            if self._dirty:
                await asyncio.sleep(_RETRY_S)
                self._some.set()

    # --- inside

    def _entry(self, key: VersionKey) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            decision = LiveDecision(way=Live.OFF, reason="not decided yet")
            entry = self._entries[key] = _Entry(decision=decision, at=self._clock.wall_s())
        return entry

    def _record(self, key: VersionKey) -> LiveChanged | None:
        epoch, entry = self._epoch(), self._entries.get(key)
        if epoch is None or entry is None:
            return None
        self._serial += 1
        record = LiveRecord(
            function=key.function,
            version=key.version,
            controller_epoch=epoch,
            serial=self._serial,
            way=entry.decision.way,
            reason=entry.decision.reason,
            at=entry.at,
            pipelines=tuple(entry.pipelines.values()),
        )
        return LiveChanged(record=record, ttl_s=TTL_S if entry.pipelines else _DECISION_TTL_S)

    def _tell(self, key: VersionKey) -> None:
        change = self._record(key)
        if change is not None:
            self._directory.apply(change, self._clock.monotonic_s())
            self._changes.notify_soon()
        self._dirty.add(key)
        self._some.set()

    async def _publish(self, key: VersionKey) -> bool:
        """Whether nothing more is to be done."""
        change = self._record(key)
        if change is None:
            return True  # whoever has the lease tells
        try:
            await self._state.put_live(change.record, change.ttl_s)
        except RegistryError as error:
            log.info("the live record of %s is not published: %s", key, error)
            return False
        return True

    def _forget_old(self) -> None:
        """Of versions that are current no more, decisions need not be known here for longer."""
        heads = self._directory.functions
        for key, entry in list(self._entries.items()):
            head = heads.get(key.function)
            is_old = head is None or head.current != key.version
            if is_old and not entry.pipelines and key not in self._dirty:
                del self._entries[key]
