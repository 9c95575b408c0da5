"""A peer that authenticates, says what it is told to whatever it is asked, and hangs up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdmacast.connection import listen
from rdmacast.handshake import Service
from tests.damaged_conversations import SECRET
from tests.patience import PATIENCE_S


class _Liar(asyncio.Protocol):
    def __init__(self, says: bytes) -> None:
        self._says = says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._says)
        transport.write_eof()


@asynccontextmanager
async def liar(service: Service, says: bytes) -> AsyncIterator[str]:
    """Its address."""
    listener = await listen(
        "tcp://127.0.0.1:0",
        secret=SECRET,
        service=service,
        make_protocol=lambda: _Liar(says),
        timeout_s=PATIENCE_S,
    )
    try:
        yield listener.endpoint.url
    finally:
        listener.close()
