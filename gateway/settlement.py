"""Tells nodes which calls are in the ledger, so that they forget what those used; off the requests' path."""

import asyncio
import logging
from collections.abc import Sequence

from gateway.contract import CallUse
from gateway.node_client import Links
from registry.errors import ChannelError
from registry.messages import SettleCalls

log = logging.getLogger(__name__)

_DELAY_S = 0.2
_MANY = 64
_MOST = 1024  # of one message
_SEND_S = 1.0


class Settlement:
    """Batches by node: sent after 0.2 s, or once a node has 64 calls to hear of.

    A call whose use is not exact is never settled, and neither is one whose channel is gone: its node
    writes it to the ledger itself (`LostCall`), and what the record has is subtracted there.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._waiting: dict[str, list[str]] = {}
        self._some = asyncio.Event()
        self._many = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Settlement {sum(map(len, self._waiting.values()))} waiting>"

    def note(self, uses: Sequence[CallUse]) -> None:
        """These are in the ledger."""
        for use in uses:
            if not use.exact:
                continue
            waiting = self._waiting.setdefault(use.gpu.node, [])
            waiting.append(use.gpu.call_id)
            self._some.set()
            if len(waiting) >= _MANY:
                self._many.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._some.wait()
            try:
                async with asyncio.timeout(_DELAY_S):
                    await self._many.wait()
            except TimeoutError:
                pass  # few, but they have waited long enough
            await self.flush()

    async def flush(self) -> None:
        """Send what waits now."""
        self._some.clear()
        self._many.clear()
        waiting, self._waiting = self._waiting, {}
        await asyncio.gather(*(self._send(node, calls) for node, calls in waiting.items()))

    async def _send(self, node: str, calls: list[str]) -> None:
        for start in range(0, len(calls), _MOST):
            batch = calls[start : start + _MOST]
            client = self._links.client(node)
            if client is None:
                return
            try:
                request = SettleCalls(request_ids=tuple(batch))
                async with asyncio.timeout(_SEND_S), client.call(request) as replies:
                    async for _ in replies:
                        pass
            except TimeoutError:
                # It hangs: until its channel is given up it may yet come back.
                self._waiting.setdefault(node, []).extend(calls[start:])
                self._some.set()
                return
            except ChannelError as error:
                log.info("%d calls are not settled with node %s: %s", len(calls) - start, node, error)
                return
