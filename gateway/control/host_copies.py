"""Copies of images that operator requests place and remove: warm, pull, drop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from gateway.cluster.context import ClusterContext
from gateway.control.cluster_lookup import ClusterLookup, bad_request, start_failed
from gateway.control.context import Planners
from gateway.control.node_calls import NodeCalls
from gateway.core.contract import DispatchError, PulledModel, WaitStage
from gateway.planning.cast_planner import ImageDelivery
from gateway.planning.groups import can_be_group
from gateway.planning.image_sources import choose_sources, choose_warm
from gateway.planning.placement import too_small
from gateway.planning.serving_traffic import serving_traffic
from rdmacast.aio.groups import cancel_and_discard
from registry.errors import ChannelClosed, ChannelError, RegistryError, reason_of
from registry.messages.images import ImageHolder
from registry.records.function import FunctionVersion
from registry.records.node import NodeRecord, Tier

_WARM_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """The delivery of an image to host tiers; `mine` are nodes of which this request claimed the load."""

    version: FunctionVersion
    image: str
    sources: dict[str, tuple[ImageHolder, ...]]
    delivery: ImageDelivery
    mine: set[str]


class HostCopies:
    """The part of `ClusterOperations` that loads images into host memory, and drops them from any tier."""

    def __init__(
        self, cluster: ClusterContext, planners: Planners, calls: NodeCalls, lookup: ClusterLookup
    ) -> None:
        self._state_cache = cluster.state_cache
        self._changes = cluster.changes
        self._clock = cluster.clock
        self._planner = planners.scaling
        self._casts = planners.casts
        self._calls = calls
        self._lookup = lookup

    def __repr__(self) -> str:
        return f"<HostCopies {self._state_cache!r}>"

    async def warm(self, function: str, nodes: int | None, on: Sequence[str]) -> AsyncIterator[WaitStage]:
        version = self._lookup.current(function)
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
            raise start_failed(f"{function} could not be warmed: {reason_of(error)}") from error
        finally:
            await cancel_and_discard(*tasks)
            for name in list(mine):  # of tasks that were cancelled before they ran
                self._unclaim(image, name, mine)

    async def pull(self, function: str, on: str | None) -> AsyncIterator[WaitStage | PulledModel]:
        version = self._lookup.current(function)
        if version.image is None:
            raise bad_request(f"{function} has a handler, no model")
        node = self._pull_target(version, on)
        async for stage in self.warm(function, None, (node.id,)):
            yield stage
        try:
            folder = await self._calls.pull(version, node.id)
        except RegistryError as error:
            raise start_failed(f"{function} could not be pulled: {reason_of(error)}") from error
        yield PulledModel(node=node.id, host=node.host, version=version.version, folder=folder)

    def _pull_target(self, version: FunctionVersion, on: str | None) -> NodeRecord:
        """Return the named node; else one that holds the image, or the one with the most room."""
        image, nodes = version.image or "", self._lookup.nodes(() if on is None else (on,))
        if on is None:
            held = {node.id for node in self._state_cache.holders(image, Tier.HOST)}
            nodes = [node for node in nodes if node.id in held] or choose_warm(
                image, version.image_bytes, 1, nodes
            )
        if not nodes:
            raise start_failed(self._no_host_room(version))
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

    async def ensure(self, version: FunctionVersion) -> None:
        image = version.image
        if image is None:
            return
        if not self._state_cache.holders(image, Tier.HOST):
            await self._lookup.wait_for_node()
            if self._is_read_by_parts(version):
                return
        failed: set[str] = set()
        last = self._no_host_room(version)
        for _ in range(_WARM_TRIES):
            if self._state_cache.holders(image, Tier.HOST):
                return
            await self._lookup.wait_for_node()
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
        raise start_failed(f"no host copy of {version.function}: {last}")

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
            raise start_failed(sources.error)
        if sources.loader is not None and sources.loader not in {target.id for target in targets}:
            raise start_failed(f"only node {sources.loader} can read the store: include it")
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
        nodes = self._lookup.nodes(on)
        if not nodes:
            raise DispatchError("no_nodes", "the cluster has no usable node", status=503)
        if count is not None and count > len(nodes):
            raise bad_request(f"{count} nodes requested; {len(nodes)} are usable")
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
        self._lookup.current(function)
        images = {v.image for v in self._state_cache.versions() if v.function == function and v.image}
        nodes = self._lookup.nodes(on)
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
            raise bad_request(f"not dropped from {tier}: {reason_of(error)}") from error
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
