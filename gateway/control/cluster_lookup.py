"""What operator requests look up in the cluster, wait for, and are refused with."""

import asyncio
from collections.abc import Callable, Sequence

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.state_cache import ClusterStateCache
from gateway.core.contract import DispatchError
from registry.errors import NotFound
from registry.records.function import FunctionVersion
from registry.records.node import NodeRecord

_WAIT_S = 600.0
_NODE_WAIT_S = 30.0


class ClusterLookup:
    """Functions and nodes as this gateway has them cached, with the errors of those that are not there."""

    def __init__(self, state_cache: ClusterStateCache, changes: ChangeCondition) -> None:
        self._state_cache = state_cache
        self._changes = changes

    def __repr__(self) -> str:
        return f"<ClusterLookup {self._state_cache!r}>"

    def current(self, function: str) -> FunctionVersion:
        """Return the current version of a function. Raises NotFound."""
        version = self._state_cache.current(function)
        if version is None:
            raise NotFound(f"there is no function {function!r}")
        return version

    def nodes(self, on: Sequence[str]) -> list[NodeRecord]:
        """Return the usable nodes, or those named. Raises NotFound if a named one is not usable."""
        nodes = {node.id: node for node in self._state_cache.usable_nodes()}
        for name in on:
            if name not in nodes:
                there = ", ".join(sorted(nodes)) or "none"
                raise NotFound(f"there is no node {name!r}; usable nodes: {there}")
        return [nodes[name] for name in dict.fromkeys(on)] if on else list(nodes.values())

    async def wait(self, predicate: Callable[[], bool], what: str, *, limit_s: float = _WAIT_S) -> None:
        """Wait until the predicate holds of the cache. Raises DispatchError (timeout), with `what` failed."""
        try:
            async with asyncio.timeout(limit_s):
                await self._changes.wait_for(predicate)
        except TimeoutError:
            raise DispatchError("timeout", f"{what} within {limit_s:g} s", status=504) from None

    async def wait_for_node(self) -> None:
        """Wait for a usable node. Raises DispatchError (timeout)."""
        await self.wait(
            lambda: any(True for _ in self._state_cache.usable_nodes()),
            "the cluster had no usable node",
            limit_s=_NODE_WAIT_S,
        )


def bad_request(message: str) -> DispatchError:
    return DispatchError("bad_request", message, status=400)


def start_failed(message: str) -> DispatchError:
    return DispatchError("start_failed", message, status=503)
