"""The loads that nodes report of their instances, followed over the channels while this gateway leads."""

import asyncio

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.context import ClusterContext
from gateway.cluster.node_client import ChannelPool, NodeClient
from gateway.control.leadership import Leadership
from gateway.planning.outlook import CapacityTable
from registry.errors import ChannelError
from registry.messages.node import GetStatus, InstanceLoad, NodeLoads

_SHORT = 0.9  # share of a KV cache from which on the plan is made again at once


class NodeLoadFollower:
    """One call to each node, whose replies are the loads of its instances.

    A node of an earlier release ends the call at once: of its instances nothing is known.
    """

    def __init__(
        self,
        cluster: ClusterContext,
        channels: ChannelPool,
        leadership: Leadership,
        capacities: CapacityTable,
        work: ChangeCondition,
    ) -> None:
        self._state_cache = cluster.state_cache
        self._changes = cluster.changes
        self._channels = channels
        self._leadership = leadership
        self._capacities = capacities
        self._work = work
        self._followed: dict[str, tuple[NodeClient, asyncio.Task[None]]] = {}

    def __repr__(self) -> str:
        return f"<NodeLoadFollower of {len(self._followed)} nodes>"

    async def run(self) -> None:
        """Follow all nodes until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._update(group)
                await self._changes.wait()

    def _update(self, group: asyncio.TaskGroup) -> None:
        """Follow the nodes that have a channel now; none while another gateway leads."""
        clients: dict[str, NodeClient] = {}
        if self._leadership.fence is not None:
            for entry in self._state_cache.nodes():
                if entry.reached and (client := self._channels.client(entry.record.id)) is not None:
                    clients[entry.record.id] = client
        for node, (client, task) in list(self._followed.items()):
            if clients.get(node) is not client:
                task.cancel()
                del self._followed[node]
                self._capacities.put(node, ())
        for node, client in clients.items():
            if node not in self._followed:
                task = group.create_task(self._follow(node, client), name=f"loads of {node}")
                self._followed[node] = client, task

    async def _follow(self, node: str, client: NodeClient) -> None:
        before: dict[str, InstanceLoad] = {}
        try:
            async with client.call(GetStatus(follow=True)) as replies:
                async for reply in replies:
                    if isinstance(reply, NodeLoads):
                        self._capacities.put(node, reply.loads)
                        loads = {load.instance_id: load for load in reply.loads}
                        if any(_is_news(load, before.get(id_)) for id_, load in loads.items()):
                            self._work.notify_soon()
                        before = loads
        except ChannelError:
            return  # the next channel is followed anew


def _is_news(load: InstanceLoad, before: InstanceLoad | None) -> bool:
    """Return whether the number of instances may have to change at once."""
    was_seen = before is not None and before.prefill_tokens_s > 0
    was_short = before is not None and before.kv_used_tokens > _SHORT * before.kv_tokens
    is_short = load.kv_used_tokens > _SHORT * load.kv_tokens
    return (load.prefill_tokens_s > 0) > was_seen or is_short != was_short
