"""Operator requests to the cluster, executed by the gateway that receives them."""

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing

from gateway.cluster.context import ClusterContext
from gateway.cluster.state_cache import VersionKey
from gateway.control.cluster_lookup import ClusterLookup, bad_request, start_failed
from gateway.control.context import Planners
from gateway.control.host_copies import HostCopies
from gateway.control.log_merge import merge_logs
from gateway.control.node_calls import NodeCalls
from gateway.core.contract import DispatchError, PulledModel, RolloutHealth, WaitStage
from gateway.planning.placement import has_accelerators, unschedulable_reason
from registry.errors import ChannelError, RemoteError, reason_of
from registry.messages.arrivals import Arrivals
from registry.records.cast import CastState
from registry.records.change import CallTraffic, ScaleTarget, Snapshot
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask, FunctionVersion
from registry.records.instance import InstanceRecord
from registry.records.node import NodeRecord
from registry.records.rollout import RolloutState

log = logging.getLogger(__name__)

_MAX_STARTS = 3


class ClusterControl:
    """The implementation of `gateway.core.contract.ClusterOperations`."""

    def __init__(
        self,
        cluster: ClusterContext,
        planners: Planners,
        calls: NodeCalls,
        traffic: Callable[[], Mapping[tuple[str, int], CallTraffic]],
    ) -> None:
        self._state = cluster.state
        self._state_cache = cluster.state_cache
        self._changes = cluster.changes
        self._rollouts = planners.rollouts
        self._calls = calls
        self._traffic = traffic
        self._lookup = ClusterLookup(cluster.state_cache, cluster.changes)
        self._copies = HostCopies(cluster, planners, calls, self._lookup)

    def __repr__(self) -> str:
        return f"<ClusterControl {self._state_cache!r}>"

    def view(self) -> Snapshot:
        return self._state_cache.view()

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._changes.subscribe(callback)

    def ended_parts(self, cast_id: str) -> Mapping[str, CastState]:
        return self._state_cache.cast_tracker.ended_parts(cast_id)

    def traffic(self) -> Mapping[tuple[str, int], CallTraffic]:
        return self._traffic()

    def rollout_health(self, function: str) -> RolloutHealth:
        rollout = self._state_cache.rollouts.get(function)
        if rollout is None:
            return RolloutHealth()
        return self._rollouts.health(self._state_cache, function, rollout)

    async def rollout_started(self, function: str, rollout_id: str) -> None:
        seen = set[str]()  # empty until the feed brings the rollout

        def is_over() -> bool:
            head = self._state_cache.functions.get(function)
            known = None if head is None else head.rollout
            if known is None or known.id != rollout_id:
                return head is None or rollout_id in seen
            seen.add(rollout_id)
            return known.state is not RolloutState.STARTING

        await self._lookup.wait(is_over, f"the version of {function} to roll out has no ready instance")

    def arrivals(self, node: str) -> AsyncIterator[Arrivals]:
        return self._calls.arrivals(node)

    # --- scale

    async def scale(self, function: str, instances: int, on: Sequence[str], *, wait: bool) -> None:
        version = self._lookup.current(function)
        self._check_scale(version, instances, on)
        key = VersionKey(function, version.version)
        serial = self._state_cache.backoff.serial
        upward = instances > len(self._state_cache.ready(key))
        await self._state.request_scale(
            ScaleTarget(function=function, instances=instances, on=tuple(on), token=secrets.token_hex(8))
        )
        if not wait:
            return

        def reached() -> bool:
            ready = self._state_cache.ready(key)
            if instances and on:
                return len({i.node for i in ready} & set(on)) >= instances
            if instances and upward:
                return len(ready) >= instances
            known = [one for one in self._state_cache.instances(key) if one.takes_calls]
            return len(known) == len(ready) == instances

        await self._lookup.wait(
            lambda: reached() or bool(self._failure(key, serial)),
            f"{function} did not reach {instances} instances",
        )
        if not reached():
            raise start_failed(self._failure(key, serial))

    def _check_scale(self, version: FunctionVersion, instances: int, on: Sequence[str]) -> None:
        if instances < 0:
            raise bad_request("instances must be 0 or more")
        most = self._state_cache.functions[version.function].scaling.max_instances
        if most is not None and instances > most:
            raise bad_request(f"{instances} instances exceed max_instances={most}")
        nodes = self._lookup.nodes(on)
        cordoned = [node.id for node in nodes if node.cordoned]
        if on and cordoned:
            raise bad_request(f"{cordoned[0]} is cordoned: uncordon it, or name other nodes")
        nodes = [node for node in nodes if not node.cordoned]
        if on and instances > len(nodes):
            raise bad_request(f"{instances} instances do not fit on {len(nodes)} nodes")
        if instances == 0:
            return
        if not nodes:
            raise DispatchError("no_nodes", "the cluster has no usable node", status=503)
        if instances > len(nodes):
            raise bad_request(f"{instances} instances need as many nodes; {len(nodes)} are usable")
        reason = unschedulable_reason(version, nodes)
        if reason:
            raise start_failed(reason)

    def _failure(self, key: VersionKey, serial: int) -> str:
        """Return why the starts since `serial` cannot succeed, "" while they can."""
        failures = self._state_cache.backoff.failures(key, serial)
        usable = {node.id for node in self._state_cache.usable_nodes()}
        tried = {failure.node for failure in failures}
        spent = len(failures) >= _MAX_STARTS or bool(failures and usable and usable <= tried)
        if not spent or self._state_cache.starting(key):
            return ""
        return f"{key.function} could not be started: {failures[-1].error}"

    # --- nodes

    async def cordon(self, node: str, *, cordoned: bool) -> None:
        (record,) = self._lookup.nodes((node,))
        try:
            await self._calls.cordon(record.id, cordoned=cordoned)
        except ChannelError as error:
            raise DispatchError("no_nodes", f"node {node}: {reason_of(error)}", status=503) from error
        await self._calls.refresh(record.id)
        self._changes.notify_soon()

    async def drain(self, node: str, *, wait: bool) -> Sequence[InstanceRecord]:
        await self.cordon(node, cordoned=True)
        moved, serial = self._running(node), self._state_cache.backoff.serial
        others = [one.id for one in self._state_cache.usable_nodes() if not one.cordoned]
        if moved and not others:
            raise DispatchError(
                "no_nodes", f"{node} is cordoned, and there is no other node for what runs there", status=503
            )
        keys = {VersionKey(one.function, one.version) for one in moved}
        for key in sorted(keys):
            if key.version != self._lookup.current(key.function).version:
                continue  # it stops by itself
            live = [one for one in self._state_cache.instances(key) if one.takes_calls]
            await self._state.request_scale(
                ScaleTarget(
                    function=key.function,
                    instances=min(len(live), len(others)),
                    on=tuple(others),
                    token=secrets.token_hex(8),
                )
            )

        def failure() -> str:
            return next((reason for key in sorted(keys) if (reason := self._failure(key, serial))), "")

        if wait:
            await self._lookup.wait(
                lambda: not self._running(node) or bool(failure()), f"{node} was not drained"
            )
            if self._running(node):
                raise start_failed(failure())
        return self._running(node)

    def _running(self, node: str) -> list[InstanceRecord]:
        return list(self._state_cache.index.instances_on(node))

    # --- models and their copies in host memory

    async def check_model(self, version: FunctionVersion) -> bool:
        if version.image is None:
            return False
        await self._lookup.wait_for_node()
        usable = list(self._state_cache.usable_nodes())
        nodes = [
            node for node in usable if version.engine in node.engines and has_accelerators(version, node)
        ]
        kinds = {node.device.partition(":")[0]: node.id for node in nodes}
        refusal = "" if kinds else unschedulable_reason(version, usable)
        for node in kinds.values():
            try:
                natively = await self._calls.check(version, node)
                return natively and (version.engine is EngineKind.NATIVE or _fits_an_arena(version, nodes))
            except RemoteError as error:
                if error.code == "unsupported_model":
                    refusal = error.message
                elif version.engine is not EngineKind.NATIVE:
                    raise start_failed(f"{version.function} was not checked: {error.message}") from error
                else:  # of an earlier release, which checks nothing
                    log.info("node %s did not check %s: %s", node, version.function, error)
            except ChannelError:
                continue  # it is lost: the load that follows is made elsewhere
        if refusal:
            if version.engine is EngineKind.NATIVE and version.task is FunctionTask.GENERATE:
                refusal += "; or deploy it with --engine vllm"
            raise DispatchError("unsupported_model", refusal, status=422)
        return version.engine is EngineKind.NATIVE

    async def ensure_host_copy(self, version: FunctionVersion) -> None:
        await self._copies.ensure(version)

    def warm(self, function: str, nodes: int | None, on: Sequence[str]) -> AsyncIterator[WaitStage]:
        return self._copies.warm(function, nodes, on)

    def pull(self, function: str, on: str | None) -> AsyncIterator[WaitStage | PulledModel]:
        return self._copies.pull(function, on)

    async def drop(self, function: str, tier: str, on: Sequence[str]) -> None:
        await self._copies.drop(function, tier, on)

    # --- logs

    async def logs(self, function: str, since_version: int, lines: int, follow: bool) -> AsyncIterator[str]:
        for node, is_back in sorted(self._state_cache.killed_nodes(function, since_version).items()):
            if is_back:
                yield f"{node} | (this node was restarted, and has the last lines from before)"
            else:
                yield f"{node} | (this node is gone, and the next one started on its host has its last lines)"
        found = merge_logs(
            self._state_cache.usable_nodes,
            lambda node, count: self._calls.logs(node, function, since_version, count, follow),
            self._changes,
            lines=lines,
            follow=follow,
        )
        async with aclosing(found):
            async for line in found:
                yield line


def _fits_an_arena(version: FunctionVersion, nodes: Iterable[NodeRecord]) -> bool:
    """Return whether the nodes' own engine has the space for the model that another will serve."""
    return any(not node.gpu_bytes or version.image_bytes <= node.gpu_bytes for node in nodes)
