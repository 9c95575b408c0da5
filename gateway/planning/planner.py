"""Scaling, placement and redeploys as one pure step from the state cache to actions.

The planner records its requests until the state cache shows them, so that a start in progress is never
requested twice. `plan` returns actions; the controller that executes them reports the results through the
`on_*` methods.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from gateway.cluster.backoff import BackoffTable
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.actions import StartAction, StopAction
from gateway.planning.groups import LayerSizes, broken_groups
from gateway.planning.loads import can_resume, function_loads
from gateway.planning.node_demands import UnplacedInstances
from gateway.planning.outlook import LoadOutlook
from gateway.planning.placement import choose_stops
from gateway.planning.plan import DecidedLoad, NodeAffinity, Plan, PlannerSettings, VersionDemand
from gateway.planning.policy import (
    FunctionLoad,
    PolicyState,
    ScalerPolicy,
    ScalingDecision,
    with_target,
    without_floor,
)
from gateway.planning.roles import RoleNeed, assign_roles
from gateway.planning.starts import ScalingStep, StartPlanner, StartRequest, StartResult
from registry.records.engine import EngineKind
from registry.records.function import FunctionVersion, ScalingMode, ServingMode
from registry.records.instance import GroupMember, InstanceRecord
from registry.records.live import InstanceRole
from registry.records.node import NodeRecord

log = logging.getLogger(__name__)

_MORE_NODES = 64  # for which a version is asked at once that may use all nodes


class ScalingPlanner:
    """The planner of one controller; `backoff` is shared with the state cache."""

    def __init__(
        self,
        policy: ScalerPolicy,
        new_id: Callable[[VersionKey], str],
        settings: PlannerSettings | None = None,
        backoff: BackoffTable | None = None,
        outlook: LoadOutlook | None = None,
    ) -> None:
        self._policy = policy
        self._settings = settings or PlannerSettings()
        self._states: dict[VersionKey, PolicyState] = {}
        self._current: dict[str, int] = {}
        self._candidates: dict[str, int] = {}  # of rollouts in progress
        self._retiring: dict[VersionKey, float] = {}  # since when
        self._undecided: set[VersionKey] = set()  # the policy failed
        self._affinities: dict[VersionKey, NodeAffinity] = {}
        self._seen_requests: dict[str, float] = {}
        self.backoff = backoff or BackoffTable(
            first_s=self._settings.backoff_s, max_s=self._settings.max_backoff_s
        )
        self.outlook = outlook or LoadOutlook()
        self._starts = StartPlanner(new_id, self._settings, self.backoff)
        self.pending = self._starts.pending
        self.stopping = self._starts.stopping  # instance -> node
        self._beyond: dict[VersionKey, int] = {}  # instances that only further nodes allow
        self._paused: dict[str, float] = {}  # surplus with calls, since when: no calls, stopped when idle
        self.prefetching = self._starts.prefetching  # (image, node), oldest first

    def __repr__(self) -> str:
        return (
            f"<ScalingPlanner pending={len(self.pending)} stopping={len(self.stopping)} "
            f"prefetching={len(self.prefetching)}>"
        )

    # --- the step

    def plan(
        self,
        state_cache: ClusterStateCache,
        demands: Mapping[VersionKey, VersionDemand],
        in_flight: Mapping[str, int],
        now: float,
    ) -> Plan:
        """Plan one step. `in_flight` are this gateway's calls by instance; those of others are unknown."""
        self._settle(state_cache, now)
        self._starts.begin()
        self._beyond = {}
        self.backoff.expire(now)
        self._apply_scale_requests(state_cache, now)
        plan = Plan()
        self._stop_orphans(state_cache, plan)
        self._stop_broken_groups(state_cache, plan)
        self.outlook.begin(state_cache, now)
        loads = function_loads(
            state_cache, demands, self.pending, self.stopping, self.outlook, self._paused, self._states
        )
        step = ScalingStep(cache=state_cache, loads=loads, in_flight=in_flight, plan=plan, now=now)
        for key in self._update_current(step):
            if not self._plan_version(key, step):
                self.backoff.clear_deadline(key)
        return plan

    def _settle(self, state_cache: ClusterStateCache, now: float) -> None:
        """Remove requests that the state cache shows by now, or will never show."""
        for instance_id, pending in list(self.pending.items()):
            entry = state_cache.node(pending.node)
            shown = state_cache.instance(instance_id) is not None
            late = pending.until is not None and now >= pending.until
            if shown or late or entry is None:
                del self.pending[instance_id]
        self.outlook.forget_starts({*self.pending, *(one.instance_id for one in state_cache.instances())})
        for held in (self.stopping, self._paused):
            for instance_id in [i for i in held if state_cache.instance(i) is None]:
                del held[instance_id]
        for function in [f for f in self._current if f not in state_cache.functions]:
            del self._current[function]
            for key in [k for k in self._states if k.function == function]:
                self._remove(key)

    def _remove(self, key: VersionKey) -> None:
        self._states.pop(key, None)
        self._affinities.pop(key, None)
        self._retiring.pop(key, None)
        self._undecided.discard(key)
        self._starts.forget(key)
        self.backoff.reset(key)
        self.backoff.clear_deadline(key)

    def _apply_scale_requests(self, state_cache: ClusterStateCache, now: float) -> None:
        """Apply operators' valid scale requests, each once."""
        for request in state_cache.scale_requests:
            target = request.target
            if now > request.deadline_s or target.token in self._seen_requests:
                continue
            self._seen_requests[target.token] = request.deadline_s
            head = state_cache.functions.get(target.function)
            if head is None:
                continue
            key = VersionKey(target.function, head.current)
            self._states[key] = with_target(self._states.get(key, PolicyState()), target.instances)
            self._affinities.pop(key, None)
            if target.on and target.instances:
                self._affinities[key] = NodeAffinity(on=target.on, instances=target.instances)
            self.backoff.reset(key)
        self._seen_requests = {token: at for token, at in self._seen_requests.items() if at >= now}

    def _stop_orphans(self, state_cache: ClusterStateCache, plan: Plan) -> None:
        """Stop the instances of deleted functions."""
        for instance in state_cache.instances():
            if instance.function not in state_cache.functions:
                self._stop(instance, state_cache, plan, self._settings.delete_grace_s)

    def _stop_broken_groups(self, state_cache: ClusterStateCache, plan: Plan) -> None:
        """Stop what is left of groups that lost a member: their calls continue on others.

        A leader that cannot be reached is lost. That it cannot reach another member shows in its own record.
        """

        def is_there(member: GroupMember) -> bool:
            entry, known = state_cache.node(member.node), state_cache.instance(member.instance_id)
            if entry is None or known is None:
                return entry is not None and member.instance_id in self.pending
            return entry.reached or not known.takes_calls

        for instance in list(broken_groups(state_cache.instances(), is_there)):
            entry = state_cache.node(instance.node)
            if entry is not None and entry.reached:
                self._stop(instance, state_cache, plan, 0.0)

    def _update_current(self, step: ScalingStep) -> list[VersionKey]:
        """Record which versions became current or retiring; return the keys in planning order.

        A new current version gets as many instances as the load of the previous one needs, if that one was
        ready: they start first, and the old ones stop once these are ready.
        """
        functions, loads = step.cache.functions, step.loads
        by_function: dict[str, list[VersionKey]] = {}
        for key in loads:
            by_function.setdefault(key.function, []).append(key)
        self._retire_candidates(step)
        for name, head in functions.items():
            before = self._current.get(name)
            self._current[name] = head.current
            new = VersionKey(name, head.current)
            self._retiring.pop(new, None)
            olds = [key for key in by_function.get(name, ()) if key.version not in head.served]
            if before is None:  # the first step of this controller: all other versions are retiring
                self._retiring.update((key, step.now) for key in olds if loads[key].live)
            elif before != head.current:
                old = VersionKey(name, before)
                load = loads.get(old)
                if load is not None and load.live:
                    self._retiring[old] = step.now
                    if load.ready:
                        self._start_ahead(new, load)
        for key in [k for k in self._retiring if k not in loads or not loads[k].live]:
            self._remove(key)
        for key in [k for k in self._states if k not in loads]:
            self._remove(key)
        # Current versions first, since old ones wait for them.
        return sorted(
            loads,
            key=lambda k: (k.version != functions[k.function].current, *_turn(loads[k]), str(k)),
        )

    def _retire_candidates(self, step: ScalingStep) -> None:
        """Record which versions are rolled out now; those given up are retiring."""
        rollouts = step.cache.rollouts
        for name, number in list(self._candidates.items()):
            key, rollout = VersionKey(name, number), rollouts.get(name)
            if rollout is not None and rollout.plan.candidate == number:
                continue
            del self._candidates[name]
            if key in step.loads and step.loads[key].live and step.cache.functions[name].current != number:
                self._retiring[key] = step.now
        for name, rollout in rollouts.items():
            self._candidates[name] = rollout.plan.candidate
            self._retiring.pop(VersionKey(name, rollout.plan.candidate), None)

    def _start_ahead(self, new: VersionKey, load: FunctionLoad) -> None:
        """Set the floor of the new current version to what `load` of the old one needs."""
        known = self._states.get(new, PolicyState())
        if not (known.cut and known.asleep):  # unless it has just been scaled to zero
            self._states[new] = PolicyState(floor=max(known.floor, load.needed, 1), cut=known.cut)

    def _plan_version(self, key: VersionKey, step: ScalingStep) -> bool:
        """Plan the starts and stops of one version; return whether no node can start it."""
        load, state = step.loads[key], self._states.get(key, PolicyState())
        if key in self._retiring:
            current = VersionKey(key.function, step.cache.functions[key.function].current)
            new = step.loads[current]
            if new.ready < min(step.plan.desired.get(current, 0), new.cap):
                self._stop_paused(key, step)  # they may be in its way
                return False  # the other ones stay until the new version is ready
            if step.now < (until := self._retiring[key] + self._settings.late_calls_s):
                step.plan.replan_at(until)
                return False
            load = replace(load, scaling=replace(load.scaling, keep_alive_s=0.0))
            state = without_floor(state)
        ready = [i for i in step.cache.ready(key) if i.instance_id not in self.stopping]
        coming = [i for i in step.cache.starting(key) if i.instance_id not in self.stopping]
        keep_on: tuple[str, ...] = ()
        affinity = self._affinities.get(key)
        if affinity is not None and len({i.node for i in ready} & set(affinity.on)) >= affinity.instances:
            # The named nodes are ready: now the others are surplus, as if the number were set again.
            state, keep_on = with_target(state, affinity.instances), affinity.on
            affinity = None
            del self._affinities[key]
        decision = self._decide(key, load, state, step.now)
        self._states[key] = decision.state
        step.plan.desired[key] = decision.desired
        if load.scaling.max_instances is None and decision.desired >= load.nodes:
            more = replace(load, nodes=load.nodes + _MORE_NODES)
            if (beyond := self._decide(key, more, state, step.now).desired - decision.desired) > 0:
                self._beyond[key] = beyond
        decided = step.plan.decisions[key] = DecidedLoad(decision=decision, load=load)
        step.plan.replan_at(decision.next_at)
        step.plan.roles[key] = self._roles(key, ready, decided, step)
        missing, surplus = decision.desired - load.live, load.live - decision.desired
        if affinity is not None:
            there = {i.node for i in ready + coming}
            there |= {start.node for start in self.pending.values() if start.key == key}
            missing = min(affinity.instances, decision.desired) - len(there & set(affinity.on))
            surplus = 0  # the others stay until the named nodes are ready
        if missing > 0:
            missing -= self._resume(key, missing, step)
        stuck = missing > 0 and self._start(key, missing, affinity, step)
        by_load = load.scaling.policy is ScalingMode.LOAD and key not in self._retiring and not state.cut
        if surplus > 0:
            loader = self._starts.loader(key)
            if decision.desired and not ready:  # starts without a record yet load from there, too
                coming = [one for one in coming if one.node != loader]
            for instance in choose_stops(
                surplus, ready, coming, in_flight=step.in_flight, keep_on=keep_on, loader=loader
            ):
                if by_load and step.in_flight.get(instance.instance_id):
                    self._paused[instance.instance_id] = step.now
                    step.plan.paused[instance.instance_id] = True
                else:
                    self._stop(instance, step.cache, step.plan, self._settings.drain_grace_s)
        self._stop_paused(key, step, keep_busy=by_load)
        return stuck

    def _decide(self, key: VersionKey, load: FunctionLoad, state: PolicyState, now: float) -> ScalingDecision:
        """Return the policy's decision; if it fails, keep what runs, as all other versions go on."""
        try:
            decision = self._policy.decide(load, state, now)
        except Exception:  # a bug, or a load that the policy cannot take: logged once
            if key not in self._undecided:
                log.exception("%s: the scaling policy failed on %s", key, load)
            self._undecided.add(key)
            wanted = max(load.live, load.scaling.min_instances, min(1, load.held))
            return ScalingDecision(
                desired=min(wanted, load.cap), reason="the scaling policy failed", state=state
            )
        self._undecided.discard(key)
        return decision

    def _roles(
        self, key: VersionKey, ready: Sequence[InstanceRecord], decided: DecidedLoad, step: ScalingStep
    ) -> dict[str, InstanceRole]:
        """Return the roles of a disaggregated function's ready instances; without calls they keep theirs."""
        version = step.cache.version(key)
        if (
            decided.load.scaling.serving is not ServingMode.DISAGGREGATED
            or version is None
            or version.engine is not EngineKind.NATIVE  # no other hands calls off
        ):
            return {}
        need = decided.decision.roles or RoleNeed(prefill=decided.load.prefilling, decode=1)
        calls = {one.instance_id: step.in_flight.get(one.instance_id, 0) for one in ready}
        return assign_roles(calls, step.cache.live.roles(key.function, key.version), need)

    def _stop_paused(self, key: VersionKey, step: ScalingStep, *, keep_busy: bool = False) -> None:
        """Stop the paused instances, unless they have calls and `keep_busy`."""
        for instance in step.cache.instances(key):
            since = self._paused.get(instance.instance_id)
            if since is None:
                continue
            until = since + self._settings.drain_grace_s
            if keep_busy and step.in_flight.get(instance.instance_id) and step.now < until:
                step.plan.replan_at(until)
            else:
                del self._paused[instance.instance_id]
                self._stop(instance, step.cache, step.plan, self._settings.drain_grace_s)

    def _resume(self, key: VersionKey, count: int, step: ScalingStep) -> int:
        """Let paused instances serve again, those paused last first; return how many."""
        affinity = self._affinities.get(key)
        paused = [
            one
            for one in can_resume(step.cache.instances(key), step.cache)
            if one.instance_id in self._paused and (affinity is None or one.node in affinity.on)
        ]
        latest = sorted(paused, key=lambda one: -self._paused[one.instance_id])[:count]
        for instance in latest:
            del self._paused[instance.instance_id]
            step.plan.paused[instance.instance_id] = False
        return len(latest)

    def stand_down(self) -> list[str]:
        """Forget the recent load; return the paused instances, which another controller may use again."""
        self._states = {key: replace(state, trend=None) for key, state in self._states.items()}
        paused, self._paused = list(self._paused), {}
        return paused

    # --- starting and stopping

    def _start(self, key: VersionKey, count: int, affinity: NodeAffinity | None, step: ScalingStep) -> bool:
        """Start `count` instances, as far as nodes allow; return whether no node can start the version."""
        floor = self._states[key].floor
        request = StartRequest(key=key, count=count, has_floor=bool(floor), affinity=affinity)
        result, victims = self._starts.plan(request, step)
        for instance in victims:
            self._stop(instance, step.cache, step.plan, self._settings.drain_grace_s)
        if result is StartResult.UNSCHEDULABLE:
            self._states[key] = without_floor(self._states[key])
        elif result is StartResult.FAILED:
            self._drop_floor(key)
        return result in (StartResult.STUCK, StartResult.FAILED)

    def _stop(
        self, instance: InstanceRecord, state_cache: ClusterStateCache, plan: Plan, grace_s: float
    ) -> None:
        if instance.instance_id in self.stopping or state_cache.node(instance.node) is None:
            return
        self.stopping[instance.instance_id] = instance.node
        plan.actions.append(StopAction(instance_id=instance.instance_id, node=instance.node, grace_s=grace_s))

    def unplaced(self, state_cache: ClusterStateCache) -> Iterator[UnplacedInstances]:
        """Yield the instances that the last step wanted and found no place for."""
        short = self._starts.unplaced
        for key in {**short, **self._beyond}:
            version = state_cache.version(key)
            if version is not None:
                yield UnplacedInstances(
                    version=version,
                    count=short.get(key, 0) + self._beyond.get(key, 0),
                    min_bytes=self.backoff.min_bytes(key),
                )

    def loading(self, state_cache: ClusterStateCache, image: str) -> list[NodeRecord]:
        """Return the usable nodes on which the image is arriving, oldest first."""
        return self._starts.loading(state_cache, image)

    def _drop_floor(self, key: VersionKey) -> None:
        self._states[key] = without_floor(self._states[key])
        self._affinities.pop(key, None)

    # --- results of actions

    def on_started(self, instance_id: str, now: float) -> None:
        """Record that the node reported the instance as ready; its record must appear soon."""
        pending = self.pending.get(instance_id)
        if pending is not None:
            self.pending[instance_id] = replace(pending, until=now + self._settings.record_wait_s)
            self.backoff.succeeded(pending.key, pending.node)

    def on_start_failed(
        self, key: VersionKey, instance_id: str, node: str, now: float, *, at_fault: bool
    ) -> None:
        """Record a failed start. Not `at_fault` if the node was lost: it may be retried at once."""
        self.pending.pop(instance_id, None)
        if at_fault:
            self.backoff.failed(key, node, now)
        if self.backoff.count(key) >= self._settings.max_starts and key in self._states:
            self._drop_floor(key)

    def on_no_space(
        self, action: StartAction, state_cache: ClusterStateCache, reason: str, now: float
    ) -> None:
        """Record that the arena was too small for the start: the next one needs more free space."""
        self._starts.on_no_space(action, state_cache, reason, now)

    def cancel_start(self, instance_id: str) -> None:
        """Remove a start that was not made, for no fault of the node or the function."""
        self.pending.pop(instance_id, None)

    def on_stop_failed(self, instance_id: str) -> None:
        """Record that the node did not receive the stop: the instance counts again, and may be stopped again.

        A stop that succeeded stays recorded until the instance's record is removed, so that a late change of
        the feed does not revive it.
        """
        self.stopping.pop(instance_id, None)

    def on_layers(self, version: FunctionVersion, sizes: LayerSizes | None) -> None:
        """Record the layers of a version of which groups are to be made, None if it cannot be divided."""
        self._starts.groups.on_layers(version, sizes)

    def on_layers_failed(self, version: FunctionVersion) -> None:
        """Record that they could not be read now."""
        self._starts.groups.on_layers_failed(version)

    def on_prefetched(self, image: str, node: str) -> None:
        """Record the end of a prefetch."""
        self.prefetching.pop((image, node), None)

    def on_fetched(self, key: VersionKey) -> None:
        """Record the end of a read of a version's record."""
        self._starts.on_fetched(key)


def _turn(load: FunctionLoad) -> tuple[float, int]:
    """Return a key by which versions get nodes: first those without an instance, then by calls that wait."""
    if load.live:
        return -load.held / load.live, -load.held
    return -math.inf if load.held else 0.0, -load.held
