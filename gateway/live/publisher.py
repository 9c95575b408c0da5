"""The live serving state: one record per function version, published by the controller on change."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.live.policy import LiveDecision
from registry.clock import Clock
from registry.errors import RegistryError
from registry.records.change import LiveChanged
from registry.records.live import InstanceRole, LiveMode, LivePipeline, LiveRecord, LiveSwitch
from registry.state import ClusterState

log = logging.getLogger(__name__)

TTL_S = 10.0  # of pipelines that are not renewed
_RENEW_S = TTL_S / 3
_RETRY_S = 0.5
_DECISION_TTL_S = 3600.0  # of a decision and of roles, where there are no pipelines
_RENEW_ROLES_S = _DECISION_TTL_S / 3


@dataclass(slots=True)
class _LiveState:
    decision: LiveDecision
    at: float
    pipelines: dict[str, LivePipeline] = field(default_factory=dict)
    roles: Mapping[str, InstanceRole] = field(default_factory=dict)


class LiveStatePublisher:
    """A publisher of live records: changes apply here at once, and elsewhere when `run` has published them.

    Nothing is published without the controller lease (`epoch` returns None).
    """

    def __init__(
        self,
        state: ClusterState,
        state_cache: ClusterStateCache,
        changes: ChangeCondition,
        clock: Clock,
        epoch: Callable[[], int | None],
    ) -> None:
        self._state = state
        self._state_cache = state_cache
        self._changes = changes
        self._clock = clock
        self._epoch = epoch
        self._states: dict[VersionKey, _LiveState] = {}
        self._serial = 0
        self._dirty: set[VersionKey] = set()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        pipelines = {str(key): [*state.pipelines.values()] for key, state in self._states.items()}
        return f"<LiveStatePublisher {pipelines}>"

    def pipeline(self, key: VersionKey, pipeline_id: str) -> LivePipeline | None:
        entry = self._states.get(key)
        return None if entry is None else entry.pipelines.get(pipeline_id)

    def set_decision(self, key: VersionKey, decision: LiveDecision) -> None:
        entry = self._state_of(key)
        if decision == entry.decision:
            return
        log.info("%s: %s", key, decision.reason)
        entry.decision, entry.at = decision, self._clock.wall_s()
        self._mark_changed(key)

    def set_roles(self, key: VersionKey, roles: Mapping[str, InstanceRole]) -> None:
        """Publish the roles of a disaggregated function's instances, by id."""
        known = self._states.get(key)
        if roles != ({} if known is None else known.roles):
            self._state_of(key).roles = dict(roles)
            self._mark_changed(key)

    def put_pipeline(self, key: VersionKey, pipeline: LivePipeline) -> None:
        """Publish a pipeline that takes calls, replacing its earlier epoch."""
        self._state_of(key).pipelines[pipeline.pipeline_id] = pipeline
        self._mark_changed(key)

    def add_switch(self, key: VersionKey, pipeline_id: str, switch: LiveSwitch) -> None:
        pipeline = self.pipeline(key, pipeline_id)
        if pipeline is not None:
            self.put_pipeline(key, replace(pipeline, switched=(*pipeline.switched, switch)))

    def remove_pipeline(self, key: VersionKey, pipeline_id: str) -> None:
        """Remove a pipeline, which takes no more calls."""
        entry = self._states.get(key)
        if entry is not None and entry.pipelines.pop(pipeline_id, None) is not None:
            self._mark_changed(key)

    def recover(self, record: LiveRecord) -> None:
        """Continue from the record of an earlier controller."""
        entry = self._state_of(VersionKey(record.function, record.version))
        entry.decision = LiveDecision(way=record.way, reason=record.reason)
        entry.at = record.at
        entry.pipelines = {one.pipeline_id: one for one in record.pipelines}
        entry.roles = record.roles
        self._mark_changed(VersionKey(record.function, record.version))

    def clear(self) -> None:
        """Discard all records: another controller has published since."""
        self._states.clear()

    async def run(self) -> None:
        """Publish until cancelled."""
        loop = asyncio.get_running_loop()
        renew_at, renew_roles_at = loop.time() + _RENEW_S, loop.time() + _RENEW_ROLES_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(renew_at):
                    await self._changed.wait()
            self._changed.clear()
            if loop.time() >= renew_at:  # even under constant change
                renew_at = loop.time() + _RENEW_S
                self._discard_old()
                self._dirty |= {key for key, entry in self._states.items() if entry.pipelines}
            if loop.time() >= renew_roles_at:
                renew_roles_at = loop.time() + _RENEW_ROLES_S
                self._dirty |= {key for key, entry in self._states.items() if entry.roles}
            keys, self._dirty = self._dirty, set()
            for key in keys:
                if not await self._publish(key):
                    self._dirty.add(key)
            if self._dirty:
                await asyncio.sleep(_RETRY_S)
                self._changed.set()

    # --- inside

    def _state_of(self, key: VersionKey) -> _LiveState:
        entry = self._states.get(key)
        if entry is None:
            decision = LiveDecision(way=LiveMode.OFF, reason="not decided yet")
            entry = self._states[key] = _LiveState(decision=decision, at=self._clock.wall_s())
        return entry

    def _record(self, key: VersionKey) -> LiveChanged | None:
        epoch, entry = self._epoch(), self._states.get(key)
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
            roles=entry.roles,
        )
        return LiveChanged(record=record, ttl_s=TTL_S if entry.pipelines else _DECISION_TTL_S)

    def _mark_changed(self, key: VersionKey) -> None:
        change = self._record(key)
        if change is not None:
            self._state_cache.apply(change, self._clock.monotonic_s())
            self._changes.notify_soon()
        self._dirty.add(key)
        self._changed.set()

    async def _publish(self, key: VersionKey) -> bool:
        """Publish the record of a version; return False if it must be retried."""
        change = self._record(key)
        if change is None:
            return True  # the holder of the lease publishes
        try:
            await self._state.put_live(change.record, change.ttl_s)
        except RegistryError as error:
            log.info("%s: live record not published, will retry: %s", key, error)
            return False
        return True

    def _discard_old(self) -> None:
        """Discard the decisions of versions that are not current any more."""
        heads = self._state_cache.functions
        for key, entry in list(self._states.items()):
            head = heads.get(key.function)
            is_old = head is None or key.version not in head.served
            if is_old and not entry.pipelines and key not in self._dirty:
                del self._states[key]
