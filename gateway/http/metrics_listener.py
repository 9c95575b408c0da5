"""The listener of --metrics-port: a small HTTP server without keys, apart from that of the clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from gateway.http.connections import ConnectionLimiter
from gateway.http.protocol import BoundedHttpProtocol
from registry.errors import InvalidRecord

_MAX_CONNECTIONS = 32  # out of the reserve of descriptors, so that clients cannot take them
_HEAD_S = 5.0
_STUCK_S = 10.0


@asynccontextmanager
async def metrics_listener(
    app: ASGIApp, host: str, port: int, *, head_s: float = _HEAD_S
) -> AsyncIterator[int]:
    """Serve `app` on an address of its own for the block; yield the port. Raises InvalidRecord."""
    connections = ConnectionLimiter(_MAX_CONNECTIONS)
    bounded = partial(
        BoundedHttpProtocol, head_s=head_s, first_byte_s=head_s, stuck_s=_STUCK_S, connections=connections
    )
    config = uvicorn.Config(
        app,
        http=bounded,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
    )
    config.load()
    state = ServerState()
    made = partial(bounded, config=config, server_state=state, app_state={})
    try:
        server = await asyncio.get_running_loop().create_server(made, host, port)
    except OSError as error:
        raise InvalidRecord(f"--metrics-port {port} of {host}: {error.strerror}") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in tuple(state.connections):
            connection.transport.abort()
