"""Uvicorn around the application: our own signals, and a drain before its shutdown.

Uvicorn stops listening first and waits for open streams after that, so that nobody would hear that
this gateway is leaving: here it goes on listening, and answering 503, until all is quiet.
"""

import asyncio
import logging
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from gateway.drain import Gate
from gateway.http_protocol import BoundedHttpProtocol
from gateway.settings import GatewaySettings

_log = logging.getLogger("hypercast.gateway")

_CUT_S = 2  # for connections that are still open after the grace time
_KEEP_ALIVE_S = 75


class GatewayServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends it at once."""

    def __init__(self, app: ASGIApp, gate: Gate, settings: GatewaySettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="uvloop",
                http=partial(  # type: ignore[arg-type]
                    BoundedHttpProtocol,
                    head_s=settings.limits.body_idle_s,
                    stuck_s=settings.streams.write_timeout_s,
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CUT_S,
            )
        )
        self._gate = gate
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leave = asyncio.Event()
        self.listening = asyncio.Event()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler; uvicorn installs it."""
        if self._leave.is_set():
            self.force_exit = self.should_exit = True
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self.leave)

    def leave(self) -> None:
        """Begin to drain."""
        self._leave.set()

    async def serve_and_drain(self) -> None:
        """Serve; returns when drained and closed."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            drain = group.create_task(self._drain(), name="drain")
            await self.serve()
            drain.cancel()

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup()
        self.listening.set()
        _log.info("listening on http://%s:%d", self._settings.host, self.port)

    async def _drain(self) -> None:
        await self._leave.wait()
        self._gate.drain()
        _log.info("draining, %d requests in flight", self._gate.in_flight)
        quiet, _ = await asyncio.gather(
            self._gate.wait_idle(self._settings.grace_s), asyncio.sleep(self._settings.linger_s)
        )
        if not quiet:
            _log.warning("%d requests are cut off, the grace time is over", self._gate.in_flight)
        self.should_exit = True
