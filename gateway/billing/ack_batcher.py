"""Batched acknowledgements to nodes of calls whose usage is in the ledger, off the request path."""

import asyncio
import logging
from collections.abc import Sequence

from gateway.cluster.node_client import ChannelPool
from gateway.core.contract import CallUsage
from registry.errors import ChannelError
from registry.messages.node import SettleCalls

log = logging.getLogger(__name__)

_BATCH_DELAY_S = 0.2
_FLUSH_CALLS = 64  # a node with this many calls is sent to at once
_MAX_MESSAGE_CALLS = 1024
_SEND_TIMEOUT_S = 1.0


class AckBatcher:
    """Acknowledgements by node, sent after 0.2 s, or once a node has 64 of them.

    A call whose usage is not exact is never acknowledged, and neither is one whose channel is closed: its
    node writes the usage to the ledger itself (`LostCall`), less what the request's record has.
    """

    def __init__(self, links: ChannelPool) -> None:
        self._links = links
        self._pending: dict[str, list[str]] = {}
        self._any_pending = asyncio.Event()
        self._full = asyncio.Event()

    def __repr__(self) -> str:
        return f"<AckBatcher {sum(map(len, self._pending.values()))} pending>"

    def add(self, uses: Sequence[CallUsage]) -> None:
        """Acknowledge these calls, whose usage is in the ledger, with the next batch."""
        for use in uses:
            if not use.exact:
                continue
            pending = self._pending.setdefault(use.gpu.node, [])
            pending.append(use.gpu.call_id)
            if len(pending) == 1:
                self._any_pending.set()
            if len(pending) >= _FLUSH_CALLS:
                self._full.set()

    async def run(self) -> None:
        """Send batches until cancelled."""
        while True:
            await self._any_pending.wait()
            try:
                async with asyncio.timeout(_BATCH_DELAY_S):
                    await self._full.wait()
            except TimeoutError:
                pass  # a small batch, but due
            await self.flush()

    async def flush(self) -> None:
        """Send all pending acknowledgements now."""
        self._any_pending.clear()
        self._full.clear()
        pending, self._pending = self._pending, {}
        await asyncio.gather(*(self._send(node, calls) for node, calls in pending.items()))

    async def _send(self, node: str, calls: list[str]) -> None:
        for start in range(0, len(calls), _MAX_MESSAGE_CALLS):
            batch = calls[start : start + _MAX_MESSAGE_CALLS]
            client = self._links.client(node)
            if client is None:
                return
            try:
                request = SettleCalls(request_ids=tuple(batch))
                async with asyncio.timeout(_SEND_TIMEOUT_S), client.call(request) as replies:
                    async for _ in replies:
                        pass
            except TimeoutError:
                # The node may still recover before its channel is closed.
                self._pending.setdefault(node, []).extend(calls[start:])
                self._any_pending.set()
                return
            except ChannelError as error:
                log.info("node %s: %d calls not acknowledged: %s", node, len(calls) - start, error)
                return
