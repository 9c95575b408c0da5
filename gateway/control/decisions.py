"""Publishes the decisions that change the number of instances, so that every gateway can show them."""

import asyncio
import logging
import math

from gateway.cluster.state_cache import VersionKey
from gateway.planning.plan import DecidedLoad, Plan
from registry.errors import RegistryError
from registry.records.function import ScalingMode
from registry.records.scaling import ScalingInputs, ScalingRecord
from registry.state import ClusterState

log = logging.getLogger(__name__)


class DecisionPublisher:
    """A publisher of the latest decision of each version; `note` is cheap."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._desired: dict[VersionKey, int] = {}
        self._waiting: dict[VersionKey, ScalingRecord] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<DecisionPublisher {len(self._waiting)} waiting>"

    def note(self, plan: Plan, wall_s: float) -> None:
        """Publish what the plan has decided anew."""
        for key, decided in plan.decisions.items():
            if self._desired.get(key) != decided.decision.desired:
                self._waiting[key] = scaling_record(key, decided, wall_s)
                self._changed.set()
        self._desired = dict(plan.desired)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting:
                record = self._waiting.pop(next(iter(self._waiting)))
                try:
                    await self._state.put_scaling_record(record)
                except RegistryError as error:  # the next one will show
                    log.info("decision on %s not published: %s", record.function, error)


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
