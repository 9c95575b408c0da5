"""Operator requests to the cluster, executed by the gateway that receives them."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from gateway.cluster.context import ClusterContext
from gateway.cluster.state_cache import VersionKey
from gateway.control.context import Planners
from gateway.control.log_merge import merge_logs
from gateway.control.node_calls import NodeCalls
from gateway.core.contract import DispatchError, PulledModel, RolloutHealth, WaitStage
from gateway.planning.cast_planner import ImageDelivery
from gateway.planning.groups import can_be_group
from gateway.planning.image_sources import choose_sources, choose_warm
from gateway.planning.placement import has_accelerators, too_small, unschedulable_reason
from gateway.planning.serving_traffic import serving_traffic
from rdmacast.aio.groups import cancel_and_discard
from registry.errors import ChannelClosed, ChannelError, NotFound, RegistryError, RemoteError, reason_of
from registry.messages.arrivals import Arrivals
from registry.messages.images import ImageHolder
from registry.records.cast import CastState
from registry.records.change import CallTraffic, ScaleTarget, Snapshot
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask, FunctionVersion
from registry.records.instance import InstanceRecord
from registry.records.node import NodeRecord, Tier
from registry.records.rollout import RolloutState

log = logging.getLogger(__name__)

_WAIT_S = 600.0
_MAX_STARTS = 3
_WARM_TRIES = 3
_NODE_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """The delivery of an image to host tiers; `mine` are nodes of which this request claimed the load."""

    version: FunctionVersion
    image: str
    sources: dict[str, tuple[ImageHolder, ...]]
    delivery: ImageDelivery
    mine: set[str]


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
        self._clock = cluster.clock
        self._planner = planners.scaling
        self._casts = planners.casts
        self._rollouts = planners.rollouts
        self._calls = calls
        self._traffic = traffic

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

        await self._wait(is_over, f"the version of {function} to roll out has no ready instance")

    def arrivals(self, node: str) -> AsyncIterator[Arrivals]:
        return self._calls.arrivals(node)

    # --- scale

    async def scale(self, function: str, instances: int, on: Sequence[str], *, wait: bool) -> None:
        version = self._current(function)
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

        await self._wait(
            lambda: reached() or bool(self._failure(key, serial)),
            f"{function} did not reach {instances} instances",
        )
        if not reached():
            raise _start_failed(self._failure(key, serial))

    def _check_scale(self, version: FunctionVersion, instances: int, on: Sequence[str]) -> None:
        if instances < 0:
            raise _bad_request("instances must be 0 or more")
        most = self._state_cache.functions[version.function].scaling.max_instances
        if most is not None and instances > most:
            raise _bad_request(f"{instances} instances exceed max_instances={most}")
        nodes = self._nodes(on)
        cordoned = [node.id for node in nodes if node.cordoned]
        if on and cordoned:
            raise _bad_request(f"{cordoned[0]} is cordoned: uncordon it, or name other nodes")
        nodes = [node for node in nodes if not node.cordoned]
        if on and instances > len(nodes):
            raise _bad_request(f"{instances} instances do not fit on {len(nodes)} nodes")
        if instances == 0:
            return
        if not nodes:
            raise DispatchError("no_nodes", "the cluster has no usable node", status=503)
        if instances > len(nodes):
            raise _bad_request(f"{instances} instances need as many nodes; {len(nodes)} are usable")
        reason = unschedulable_reason(version, nodes)
        if reason:
            raise _start_failed(reason)

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
        (record,) = self._nodes((node,))
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
            if key.version != self._current(key.function).version:
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
            await self._wait(lambda: not self._running(node) or bool(failure()), f"{node} was not drained")
            if self._running(node):
                raise _start_failed(failure())
        return self._running(node)

    def _running(self, node: str) -> list[InstanceRecord]:
        return list(self._state_cache.index.instances_on(node))

    # --- host copies

    async def warm(self, function: str, nodes: int | None, on: Sequence[str]) -> AsyncIterator[WaitStage]:
        version = self._current(function)
        image = version.image
        if image is None:
            return
        targets = self._warm_targets(version, nodes, on)
        fractions = {node.id: 0.0 for node in targets}
        updates: asyncio.Queue[None] = asyncio.Queue()

        sources = self._sources(image, targets)
        delivery = self._deliver(version, sources)
        # Set before the tasks run: a concurrent request joins the cast.
        mine = {node.id for node in targets if self._claim(image, node.id)}

        def report(node: str, fraction: float) -> None:
            fractions[node] = fraction
            updates.put_nowait(None)

        fill = _Fill(version=version, image=image, sources=sources, delivery=delivery, mine=mine)
        tasks = [asyncio.create_task(self._fill(fill, node.id, report, pin=False)) for node in targets]
        for task in tasks:
            task.add_done_callback(lambda _: updates.put_nowait(None))
        try:
            while not all(task.done() for task in tasks):
                await updates.get()
                yield WaitStage(stage="fetch", fraction=round(sum(fractions.values()) / len(fractions), 2))
            for task in tasks:
                task.result()
        except RegistryError as error:
            raise _start_failed(f"{function} could not be warmed: {reason_of(error)}") from error
        finally:
            await cancel_and_discard(*tasks)
            for name in list(mine):  # of tasks that were cancelled before they ran
                self._unclaim(image, name, mine)

    async def pull(self, function: str, on: str | None) -> AsyncIterator[WaitStage | PulledModel]:
        version = self._current(function)
        if version.image is None:
            raise _bad_request(f"{function} has a handler, no model")
        node = self._pull_target(version, on)
        async for stage in self.warm(function, None, (node.id,)):
            yield stage
        try:
            folder = await self._calls.pull(version, node.id)
        except RegistryError as error:
            raise _start_failed(f"{function} could not be pulled: {reason_of(error)}") from error
        yield PulledModel(node=node.id, host=node.host, version=version.version, folder=folder)

    def _pull_target(self, version: FunctionVersion, on: str | None) -> NodeRecord:
        """Return the named node; else one that holds the image, or the one with the most room."""
        image, nodes = version.image or "", self._nodes(() if on is None else (on,))
        if on is None:
            held = {node.id for node in self._state_cache.holders(image, Tier.HOST)}
            nodes = [node for node in nodes if node.id in held] or choose_warm(
                image, version.image_bytes, 1, nodes
            )
        if not nodes:
            raise _start_failed(self._no_host_room(version))
        return nodes[0]

    def _claim(self, image: str, node: str) -> bool:
        """Record that the image is loading on the node; return False if it was recorded already."""
        if (image, node) in self._planner.prefetching:
            return False
        self._planner.prefetching[image, node] = None
        return True

    def _unclaim(self, image: str, node: str, mine: set[str]) -> None:
        """Remove the record, if it is one of `mine`."""
        if node in mine:
            mine.discard(node)
            self._planner.on_prefetched(image, node)
        self._changes.notify_soon()

    async def check_model(self, version: FunctionVersion) -> bool:
        if version.image is None:
            return False
        await self._wait_for_node()
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
                    raise _start_failed(f"{version.function} was not checked: {error.message}") from error
                else:  # of an earlier release, which checks nothing
                    log.info("node %s did not check %s: %s", node, version.function, error)
            except ChannelError:
                continue  # it is lost: the load that follows is made elsewhere
        if refusal:
            if version.engine is EngineKind.NATIVE and version.task is FunctionTask.GENERATE:
                refusal += "; or deploy it with --engine vllm"
            raise DispatchError("unsupported_model", refusal, status=422)
        return version.engine is EngineKind.NATIVE

    async def _wait_for_node(self) -> None:
        await self._wait(
            lambda: any(True for _ in self._state_cache.usable_nodes()),
            "the cluster had no usable node",
            limit_s=_NODE_WAIT_S,
        )

    async def ensure_host_copy(self, version: FunctionVersion) -> None:
        image = version.image
        if image is None:
            return
        if not self._state_cache.holders(image, Tier.HOST):
            await self._wait_for_node()
            if self._is_read_by_parts(version):
                return
        failed: set[str] = set()
        last = self._no_host_room(version)
        for _ in range(_WARM_TRIES):
            if self._state_cache.holders(image, Tier.HOST):
                return
            await self._wait_for_node()
            # A node that is loading it already is preferred, since all gateways would choose the same new
            # node.
            nodes = [n for n in self._state_cache.usable_nodes() if n.id not in failed]
            loading = [n for n in self._planner.loading(self._state_cache, image) if n.id not in failed]
            target = next(iter(loading or choose_warm(image, version.image_bytes, 1, nodes)), None)
            if target is None:
                break
            try:
                sources = self._sources(image, [target])
                delivery = self._deliver(version, sources)
                mine = {target.id} if self._claim(image, target.id) else set()
                fill = _Fill(version=version, image=image, sources=sources, delivery=delivery, mine=mine)
                await self._fill(fill, target.id, lambda *_: None, pin=True)
            except RegistryError as error:
                failed.add(target.id)
                last = reason_of(error)
            else:
                return
        raise _start_failed(f"no host copy of {version.function}: {last}")

    def _is_read_by_parts(self, version: FunctionVersion) -> bool:
        """Return whether no host memory could ever have the image, and groups read it from the store."""
        nodes = list(self._state_cache.usable_nodes())
        fits = any(node.host_bytes >= version.image_bytes for node in nodes)
        is_group = can_be_group(version) and all(too_small(node, version, 0) for node in nodes)
        return is_group and not fits and all(node.reads_store for node in nodes)

    def _no_host_room(self, version: FunctionVersion) -> str:
        largest = max((entry.record.host_bytes for entry in self._state_cache.nodes()), default=0)
        return (
            f"no node has room for its {version.image_bytes} bytes in its host memory "
            f"(the largest host tier has {largest} in all)"
        )

    async def _fill(
        self, fill: "_Fill", node: str, report: Callable[[str, float], None], *, pin: bool
    ) -> None:
        """Fill one host tier. A copy that is not pinned evicts no pinned one."""
        holders = fill.delivery.holders_for(node, fill.sources[node])
        cast = fill.delivery.cast_for(node)
        try:
            steps = self._calls.warm(fill.version, node, holders, cast=cast, pin=pin, preserve_pinned=not pin)
            async with aclosing(steps):
                async for step in steps:
                    report(node, step.fraction)
            await self._calls.refresh(node)
            report(node, 1.0)
        finally:
            self._unclaim(fill.image, node, fill.mine)

    def _sources(self, image: str, targets: Sequence[NodeRecord]) -> dict[str, tuple[ImageHolder, ...]]:
        nodes = list(self._state_cache.usable_nodes())
        loading = self._planner.loading(self._state_cache, image)
        senders = serving_traffic(self._state_cache).senders
        sources = choose_sources(image, targets, nodes, loading, senders)
        if sources.error:
            raise _start_failed(sources.error)
        if sources.loader is not None and sources.loader not in {target.id for target in targets}:
            raise _start_failed(f"only node {sources.loader} can read the store: include it")
        return {target.id: sources.holders.get(target.id, ()) for target in targets}

    def _deliver(
        self, version: FunctionVersion, sources: dict[str, tuple[ImageHolder, ...]]
    ) -> ImageDelivery:
        return self._casts.deliver(
            self._state_cache, version, sources, self._planner.loading, self._clock.wall_s()
        )

    def _warm_targets(
        self, version: FunctionVersion, count: int | None, on: Sequence[str]
    ) -> list[NodeRecord]:
        """Return the nodes to fill: those named, or enough that `count` nodes (all by default) hold it."""
        image = version.image
        assert image is not None
        nodes = self._nodes(on)
        if not nodes:
            raise DispatchError("no_nodes", "the cluster has no usable node", status=503)
        if count is not None and count > len(nodes):
            raise _bad_request(f"{count} nodes requested; {len(nodes)} are usable")
        hosts = {node.host for node in self._state_cache.holders(image, Tier.HOST)}
        missing = [node for node in nodes if node.host not in hosts]
        if on or count is None:
            return list({node.host: node for node in missing}.values())
        chosen: list[NodeRecord] = []
        have = len(nodes) - len(missing)
        for node in choose_warm(image, version.image_bytes, len(missing), missing):
            if have < count:
                chosen.append(node)
                have += sum(1 for other in missing if other.host == node.host)
        return chosen

    async def drop(self, function: str, tier: str, on: Sequence[str]) -> None:
        wanted = Tier(tier)
        self._current(function)
        images = {v.image for v in self._state_cache.versions() if v.function == function and v.image}
        nodes = self._nodes(on)
        # Once per host: its nodes share a copy, and a new copy may arrive there after the first drop.
        copies: dict[tuple[str, str], list[str]] = {}
        for node in nodes:
            for holding in node.holdings:
                if holding.image in images and wanted in holding.tiers:
                    place = node.id if wanted is Tier.GPU else node.host
                    copies.setdefault((place, holding.image), []).append(node.id)
        try:
            for (_, image), sharers in copies.items():
                if wanted is Tier.HOST:
                    await self._close_folders(image, sharers)
                await self._drop_by_one(image, sharers, tier)
            for node in nodes:
                await self._calls.refresh(node.id)
        except ChannelError as error:
            raise _bad_request(f"not dropped from {tier}: {reason_of(error)}") from error
        finally:
            self._changes.notify_soon()

    async def _close_folders(self, image: str, nodes: Sequence[str]) -> None:
        """Remove the folders that `pull` made on the nodes, each of which holds the copy of their host."""
        for name in nodes:
            with suppress(ChannelClosed):  # a lost node holds nothing
                await self._calls.close_folders(image, name)

    async def _drop_by_one(self, image: str, nodes: Sequence[str], tier: str) -> None:
        """Drop the image through the first of these nodes that is not lost meanwhile."""
        for name in nodes:
            try:
                await self._calls.drop(image, name, tier)
            except ChannelClosed:
                if name == nodes[-1]:
                    raise
            else:
                return

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

    # --- inside

    def _current(self, function: str) -> FunctionVersion:
        version = self._state_cache.current(function)
        if version is None:
            raise NotFound(f"there is no function {function!r}")
        return version

    def _nodes(self, on: Sequence[str]) -> list[NodeRecord]:
        """Return the usable nodes, or those named. Raises NotFound if a named one is not usable."""
        nodes = {node.id: node for node in self._state_cache.usable_nodes()}
        for name in on:
            if name not in nodes:
                there = ", ".join(sorted(nodes)) or "none"
                raise NotFound(f"there is no node {name!r}; usable nodes: {there}")
        return [nodes[name] for name in dict.fromkeys(on)] if on else list(nodes.values())

    async def _wait(self, predicate: Callable[[], bool], what: str, *, limit_s: float = _WAIT_S) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._changes.wait_for(predicate)
        except TimeoutError:
            raise DispatchError("timeout", f"{what} within {limit_s:g} s", status=504) from None


def _bad_request(message: str) -> DispatchError:
    return DispatchError("bad_request", message, status=400)


def _start_failed(message: str) -> DispatchError:
    return DispatchError("start_failed", message, status=503)


def _fits_an_arena(version: FunctionVersion, nodes: Iterable[NodeRecord]) -> bool:
    """Return whether the nodes' own engine has the space for the model that another will serve."""
    return any(not node.gpu_bytes or version.image_bytes <= node.gpu_bytes for node in nodes)
