"""TLS on the HTTP port, in which an unfinished handshake counts as a connection."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from gateway.http.connections import ConnectionLimiter
from gateway.http.protocol import BoundedHttpProtocol

_log = logging.getLogger("hypercast.gateway")

_tasks: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly


class TlsAcceptor(asyncio.Protocol):
    """A protocol that takes over an accepted connection, counts it and starts TLS on it.

    A server with TLS of its own reports a connection only after the handshake, so that idle ones would not
    count. The handshake and the first byte have `timeout_s` each.
    """

    def __init__(
        self,
        make: Callable[[], BoundedHttpProtocol],
        tls: ssl.SSLContext,
        connections: ConnectionLimiter,
        timeout_s: float,
    ) -> None:
        self._make = make
        self._tls = tls
        self._connections = connections
        self._timeout_s = timeout_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else "local"
        if self._connections.admit(address):
            try:
                taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            except OSError as error:
                self._connections.release(address)
                _log.warning("a connection could not be taken: %s", error)
            else:
                task = asyncio.get_running_loop().create_task(self._secure(taken, address), name="tls")
                _tasks.add(task)
                task.add_done_callback(_tasks.discard)
        cast(asyncio.Transport, transport).abort()  # of this descriptor; TLS goes on with the other

    async def _secure(self, taken: socket.socket, address: str) -> None:
        protocol = self._make()
        protocol.admitted(address)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, taken, ssl=self._tls, ssl_handshake_timeout=self._timeout_s
            )
        except OSError as error:
            _log.debug("%s: no TLS: %s", address, error)
            taken.close()
        finally:
            if not protocol.is_made:
                self._connections.release(address)
