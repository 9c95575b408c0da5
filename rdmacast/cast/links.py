"""The links of a node to the other nodes of its casts."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rdmacast.cast.watch_link import Watcher
from rdmacast.errors import CastError
from rdmacast.transport import PeerAddress
from rdmacast.transports.connector import Connector

logger = logging.getLogger(__name__)

_MAX_PREPARING = 8  # peers that are connected to at once


@dataclass(frozen=True, slots=True, kw_only=True)
class CastLinks:
    """How a node reads blocks from the others, and follows what they hold."""

    connector: Connector
    watcher: Watcher

    async def prepare(self, peers: Sequence[PeerAddress]) -> None:
        """Connect to peers before a cast needs them; one that cannot be reached is left out."""
        turns = asyncio.Semaphore(_MAX_PREPARING)

        async def connect(peer: PeerAddress) -> None:
            async with turns:
                try:
                    # First: a peer without the best transport is read over another one, and watched as ever.
                    await self.watcher.prepare(peer)
                    await self.connector.prepare(peer)
                except CastError as error:
                    logger.info("%s: no link was prepared: %s", peer.url, error)

        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(connect(peer))

    async def aclose(self) -> None:
        """Close the connections that are kept."""
        await self.connector.aclose()
        await self.watcher.aclose()
