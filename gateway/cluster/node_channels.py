"""Keeps a channel to every node of the directory: dials at once, again with backoff, drops the departed."""

import asyncio
import logging
import random
from dataclasses import dataclass

from gateway.directory import Directory
from gateway.node_client import Dial, NodeClient
from gateway.wakeup import Wakeup
from rdmacast.errors import CastError
from registry.errors import RegistryError
from registry.node import NodeRecord

log = logging.getLogger(__name__)

_DIAL_S = 5.0
_FIRST_WAIT_S = 0.05
_LAST_WAIT_S = 1.0


@dataclass(slots=True)
class _Link:
    """A node's link: `client` while the channel is up."""

    epoch: int
    address: str
    task: asyncio.Task[None]
    client: NodeClient | None = None


class NodeLinks:
    """`run` owns the tasks. Must be running before `client` gives anything."""

    def __init__(self, directory: Directory, changes: Wakeup, dial: Dial) -> None:
        self._directory = directory
        self._changes = changes
        self._dial = dial
        self._links: dict[str, _Link] = {}
        self._random = random.Random()

    def __repr__(self) -> str:
        up = sorted(node for node, link in self._links.items() if link.client is not None)
        return f"<NodeLinks up={up} of={len(self._links)}>"

    def client(self, node: str) -> NodeClient | None:
        link = self._links.get(node)
        return None if link is None else link.client

    def lost(self, node: str) -> None:
        link = self._links.get(node)
        if link is not None and link.client is not None:
            self._directory.suspect(node)
            # Whoever waits for the channel to close dials anew.
            client, link.client = link.client, None
            self._group.create_task(client.aclose())

    async def run(self) -> None:
        """Follow the directory until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            while True:
                self._follow()
                await self._changes.wait()

    def _follow(self) -> None:
        nodes = {entry.record.id: entry.record for entry in self._directory.nodes()}
        for node, link in list(self._links.items()):
            record = nodes.get(node)
            if record is None or (link.epoch, link.address) != (record.epoch, record.channel):
                link.task.cancel()
                del self._links[node]
        for node, record in nodes.items():
            if node not in self._links:
                task = self._group.create_task(self._keep(record), name=f"link {node}")
                self._links[node] = _Link(epoch=record.epoch, address=record.channel, task=task)

    async def _keep(self, record: NodeRecord) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                async with asyncio.timeout(_DIAL_S):
                    client = await self._dial(record)
            except (RegistryError, CastError, OSError) as error:  # a timeout is an OSError
                log.info("node %s at %s not reached: %s", record.id, record.channel, error)
                await asyncio.sleep(wait_s * self._random.uniform(0.5, 1.0))
                wait_s = min(_LAST_WAIT_S, wait_s * 2)
                continue
            wait_s = _FIRST_WAIT_S
            try:
                self._up(record, client)
                await client.wait_closed()
            finally:
                self._down(record, client)
                await client.aclose()
            log.info("channel to node %s closed", record.id)

    def _up(self, record: NodeRecord, client: NodeClient) -> None:
        link = self._links[record.id]
        link.client = client
        self._directory.reach(record.id, record.epoch)
        log.info("channel to node %s (epoch %d) is up", record.id, record.epoch)
        self._changes.notify_soon()

    def _down(self, record: NodeRecord, client: NodeClient) -> None:
        link = self._links.get(record.id)
        if link is not None and link.epoch == record.epoch:
            link.client = None
            self._directory.suspect(record.id)
            self._changes.notify_soon()
