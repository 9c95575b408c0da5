"""A channel to every node: dialled at once, redialled with backoff, closed when the node is removed."""

import asyncio
import logging
import random
from dataclasses import dataclass

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.node_client import Dial, NodeClient
from gateway.cluster.state_cache import ClusterStateCache
from rdmacast.errors import CastError
from registry.errors import RegistryError
from registry.records.node import NodeRecord

log = logging.getLogger(__name__)

_DIAL_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


@dataclass(slots=True)
class _NodeLink:
    """A node's channel; `client` is set while it is up."""

    epoch: int
    address: str
    task: asyncio.Task[None]
    client: NodeClient | None = None


class NodeChannels:
    """The channel pool; `run` owns its tasks and must be running before `client` returns a channel."""

    def __init__(self, state_cache: ClusterStateCache, changes: ChangeCondition, dial: Dial) -> None:
        self._state_cache = state_cache
        self._changes = changes
        self._dial = dial
        self._links: dict[str, _NodeLink] = {}
        self._random = random.Random()

    def __repr__(self) -> str:
        up = sorted(node for node, link in self._links.items() if link.client is not None)
        return f"<NodeChannels up={up} of={len(self._links)}>"

    def client(self, node: str) -> NodeClient | None:
        link = self._links.get(node)
        return None if link is None else link.client

    def report_broken(self, node: str) -> None:
        link = self._links.get(node)
        if link is not None and link.client is not None:
            self._state_cache.channel_down(node)
            # The task that waits for the channel to close redials.
            client, link.client = link.client, None
            self._group.create_task(client.aclose())

    async def run(self) -> None:
        """Follow the nodes of the state cache until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            while True:
                self._follow()
                await self._changes.wait()

    def _follow(self) -> None:
        nodes = {entry.record.id: entry.record for entry in self._state_cache.nodes()}
        for node, link in list(self._links.items()):
            record = nodes.get(node)
            if record is None or (link.epoch, link.address) != (record.epoch, record.channel):
                link.task.cancel()
                del self._links[node]
        for node, record in nodes.items():
            if node not in self._links:
                task = self._group.create_task(self._keep(record), name=f"link {node}")
                self._links[node] = _NodeLink(epoch=record.epoch, address=record.channel, task=task)

    async def _keep(self, record: NodeRecord) -> None:
        wait_s = _FIRST_BACKOFF_S
        while True:
            try:
                async with asyncio.timeout(_DIAL_TIMEOUT_S):
                    client = await self._dial(record)
            except (RegistryError, CastError, OSError) as error:  # a timeout is an OSError
                reason = str(error) or f"no answer within {_DIAL_TIMEOUT_S:g} s"
                log.info("node %s: dial of %s failed: %s", record.id, record.channel, reason)
                await asyncio.sleep(wait_s * self._random.uniform(0.5, 1.0))
                wait_s = min(_MAX_BACKOFF_S, wait_s * 2)
                continue
            wait_s = _FIRST_BACKOFF_S
            try:
                self._up(record, client)
                await client.wait_closed()
            finally:
                self._down(record, client)
                await client.aclose()
            log.info("node %s: channel closed", record.id)

    def _up(self, record: NodeRecord, client: NodeClient) -> None:
        link = self._links[record.id]
        link.client = client
        self._state_cache.channel_up(record.id, record.epoch)
        log.info("node %s: channel up (epoch %d)", record.id, record.epoch)
        self._changes.notify_soon()

    def _down(self, record: NodeRecord, client: NodeClient) -> None:
        link = self._links.get(record.id)
        if link is not None and link.epoch == record.epoch:
            link.client = None
            self._state_cache.channel_down(record.id)
            self._changes.notify_soon()
