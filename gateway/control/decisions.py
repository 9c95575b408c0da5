"""Publishes the decisions that change the number of instances, so that every gateway can show them."""

import asyncio
import logging
import math
from collections.abc import Mapping

from gateway.cluster.state_cache import VersionKey
from gateway.planning.plan import DecidedLoad, Plan
from registry.errors import RegistryError
from registry.records.function import Function, ScalingMode
from registry.records.scaling import ScalingInputs, ScalingRecord
from registry.state import ClusterState

log = logging.getLogger(__name__)


class DecisionPublisher:
    """A publisher of the latest decision on the current version of each function; `note` is cheap."""

    def __init__(self, state: ClusterState, *, retry_s: float = 0.5) -> None:
        self._state = state
        self._retry_s = retry_s
        self._desired: dict[str, tuple[VersionKey, int]] = {}  # what was last noted, by function
        self._waiting: dict[str, ScalingRecord] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<DecisionPublisher {len(self._waiting)} waiting>"

    def note(self, plan: Plan, functions: Mapping[str, Function], wall_s: float) -> None:
        """Publish what the plan has decided anew, except on versions that are being replaced."""
        noted: dict[str, tuple[VersionKey, int]] = {}
        for key, decided in plan.decisions.items():
            head = functions.get(key.function)
            if head is None or head.current != key.version:
                continue
            noted[key.function] = key, decided.decision.desired
            if self._desired.get(key.function) != noted[key.function]:
                self._waiting[key.function] = scaling_record(key, decided, wall_s)
                self._changed.set()
        self._desired = noted

    def stand_down(self) -> None:
        """Publish no more decisions: another gateway's are newer."""
        self._desired, self._waiting = {}, {}

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting:
                record = self._waiting.pop(next(iter(self._waiting)))
                try:
                    await self._state.put_scaling_record(record)
                except RegistryError as error:
                    log.info("decision on %s not published: %s", record.function, error)
                    await asyncio.sleep(self._retry_s)
                    key = VersionKey(record.function, record.version)
                    if self._desired.get(record.function) == (key, record.desired):
                        self._waiting.setdefault(record.function, record)


def scaling_record(key: VersionKey, decided: DecidedLoad, wall_s: float) -> ScalingRecord:
    """Return the record of a decision."""
    decision, load = decided.decision, decided.load
    capacity, trend, scaling = load.capacity, decision.state.trend, load.scaling
    by_load = scaling.policy is ScalingMode.LOAD
    decodes = capacity.max_decodes(scaling.tbt_target_s)
    inputs = ScalingInputs(
        in_flight=load.in_flight,
        held=load.held,
        ready=load.ready,
        starting=load.starting,
        queued_prompt_tokens=load.tokens.waiting,
        arriving_tokens_s=0.0 if trend is None else round(trend.short, 1),
        kv_tokens=load.tokens.kv_tokens,
        prefill_tokens_s=round(capacity.prefill_tokens_s, 1),
        kv_tokens_each=capacity.kv_tokens,
        max_decodes=0 if math.isinf(decodes) else int(decodes),
        start_s=round(load.starts.next_s, 3) if by_load else 0.0,
    )
    return ScalingRecord(
        function=key.function,
        version=key.version,
        policy=scaling.policy,
        desired=decision.desired,
        reason=decision.reason,
        at=wall_s,
        inputs=inputs,
    )
