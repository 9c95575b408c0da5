"""What a cast uses from its caller: links to the other nodes, and hooks for each block."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from rdmacast.cast.watch_link import Watcher
from rdmacast.errors import CastError
from rdmacast.transport import Check, PeerAddress
from rdmacast.transports.connector import Connector

logger = logging.getLogger(__name__)

_MAX_PREPARING = 8  # connections that are opened at once

OnBlock = Callable[[int, int], None]
Prepare = Callable[[int, int], object]


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
                    await self.connector.prepare(peer)
                    await self.watcher.prepare(peer)
                except CastError as error:
                    logger.info("%s: no link was prepared: %s", peer.url, error)

        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(connect(peer))

    async def aclose(self) -> None:
        """Close the connections that are kept."""
        await self.connector.aclose()
        await self.watcher.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHooks:
    """Callbacks for each block, as (offset, nbytes) or (offset, view) of the region.

    `prepare` runs in a thread of `executor` (None: the loop's) before a block is first written to. `check`
    runs in a thread on each block that arrived, or on one piece of `check_bytes` after the other where the
    transport supports this, and returns the indexes of damaged units. `on_block` then runs on the event loop,
    in the order in which good blocks arrive. What a hook raises ends the cast.
    """

    check: Check
    check_bytes: int | None = None
    prepare: Prepare | None = None
    on_block: OnBlock | None = None
    executor: Executor | None = None
