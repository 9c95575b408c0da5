"""Accepts the connections of a listening socket for as long as it is open."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator

_PAUSE_S = 0.1  # after a failure, which may last


async def accepted(listening: socket.socket, log: logging.Logger) -> AsyncGenerator[socket.socket, None]:
    """Yield each connection, which the caller closes; never ends. Failures are logged."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            one, _ = await loop.sock_accept(listening)
        except OSError as error:  # such as too many open files
            log.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(_PAUSE_S)
        else:
            yield one
