"""Uvicorn with signals of our own, and a drain before its shutdown.

Uvicorn stops listening first and waits for open streams after that, so clients would get refused
connections: here it listens, and responds 503, until nothing is in flight. What has connected by then is
accepted before the listener closes, and gets its response: a closed connection with a request that was not
read is reset, after which a client cannot know whether it ran.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from gateway.core.settings import GatewaySettings
from gateway.http.connections import ConnectionLimiter, connection_limit, trim_heap
from gateway.http.drain import InFlightLimiter
from gateway.http.protocol import BoundedHttpProtocol
from gateway.http.tls import TlsAcceptor
from registry.config.tls import open_https

_log = logging.getLogger("hypercast.gateway")

_SHUTDOWN_S = 2  # for connections that are open after the grace time
_KEEP_ALIVE_S = 75
_DATE_S = 1.0  # the resolution of the header `date`
_TRIM_AFTER_S = 5.0  # when many connections have closed, and their last objects are freed


class GatewayServer(uvicorn.Server):
    """A server that drains on SIGTERM or SIGINT; a second signal ends it at once."""

    def __init__(self, app: ASGIApp, limiter: InFlightLimiter, settings: GatewaySettings) -> None:
        self.connections = ConnectionLimiter(connection_limit(settings.max_connections), self._on_ebb)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="uvloop",
                http=_protocol_factory(settings, self.connections),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_SHUTDOWN_S,
            )
        )
        self._limiter = limiter
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leave = asyncio.Event()
        self._drained = asyncio.Event()
        self._forced = asyncio.Event()  # by a second signal
        self.listening = asyncio.Event()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; uvicorn installs this."""
        if self._leave.is_set():
            self.force_exit = self.should_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._drained.set)
                self._loop.call_soon_threadsafe(self._forced.set)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self.leave)

    def leave(self) -> None:
        """Start to drain."""
        self._leave.set()

    def _on_ebb(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(_TRIM_AFTER_S, loop.run_in_executor, None, trim_heap)

    async def serve_and_drain(self) -> None:
        """Serve until drained and closed."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            drain = group.create_task(self._drain(), name="drain")
            await self.serve()
            drain.cancel()

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup()
        self.listening.set()
        _log.info("listening on %s://%s:%d", self._settings.scheme, self._settings.host, self.port)

    async def main_loop(self) -> None:
        """Serve until drained, which wakes this at once; uvicorn's own looks ten times a second."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), _DATE_S)

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Close the connections; after `_SHUTDOWN_S` cancel what still sends. Uvicorn's always waits."""
        await _poll()  # which accepts what has connected, and reads the requests that have arrived
        for server in self.servers:
            server.close()
        await _poll()
        self.connections.is_closing = True
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # what was idle is closed then
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._wait_closed()
                await self._wait_tasks_to_complete()
        except TimeoutError:
            tasks = self.server_state.tasks
            _log.error("shutdown took %d s: cancelling %d tasks", _SHUTDOWN_S, len(tasks))
            for task in tasks:
                task.cancel()

    async def _wait_closed(self) -> None:
        """Wait until no connection is open, those within a TLS handshake included, or for a second signal."""
        if self.force_exit:
            return
        waits = [asyncio.create_task(one) for one in (self.connections.wait_closed(), self._forced.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _drain(self) -> None:
        await self._leave.wait()
        self._limiter.drain()
        _log.info("draining: %d requests in flight", self._limiter.in_flight)
        quiet, _ = await asyncio.gather(
            self._limiter.wait_idle(self._settings.grace_s), asyncio.sleep(self._settings.linger_s)
        )
        if not quiet:
            _log.warning("grace time over: cancelling %d requests", self._limiter.in_flight)
        self.should_exit = True
        self._drained.set()


async def _poll() -> None:
    """Let the event loop poll its sockets once, and run the callbacks of what it found."""
    for _ in range(3):
        await asyncio.sleep(0)


def _protocol_factory(
    settings: GatewaySettings, connections: ConnectionLimiter
) -> Callable[..., asyncio.Protocol]:
    """Return what makes the protocol of each connection. Raises InvalidRecord for unusable TLS files."""
    make = partial(
        BoundedHttpProtocol,
        head_s=settings.limits.body_idle_s,
        first_byte_s=settings.limits.first_byte_s,
        stuck_s=settings.streams.write_timeout_s,
        connections=connections,
    )
    if settings.tls.http is None:
        return make
    tls, timeout_s = open_https(settings.tls.http), settings.limits.first_byte_s
    return lambda **named: TlsAcceptor(partial(make, **named), tls, connections, timeout_s)
