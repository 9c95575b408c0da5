"""/admin/watch: what the console shows, as server-sent events."""

from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import ApiError
from gateway.core.request_context import request_context
from gateway.http.disconnect import CancelOnDisconnect
from gateway.http.drain import ServingPhase
from gateway.http.sse import EventStream
from gateway.requests.services import Services
from gateway.schemas.parameters import ONCE
from gateway.watch.hub import Watcher
from gateway.watch.scope import scope_of
from registry.errors import StateUnavailable

_LOOK_S = 1.0  # after which a quiet stream looks whether it is to end


class WatchRoutes:
    """The handler of the event stream."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def watch(self, request: Request) -> ASGIApp:
        """Send all that the key may see, then what changes, until the client leaves or the key ends."""
        return WatchReply(self._services, once=ONCE.read(request))


@dataclass(frozen=True, slots=True, eq=False)
class WatchReply:
    """The stream of one watcher: each event is a frame, the first a whole one, with `once` the only one."""

    services: Services
    once: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = request_context(scope).caller
        stream = EventStream(send, self.services.settings.streams.write_timeout_s)
        with self.services.watch.join(scope_of(key), key.tenant) as watcher:
            await stream.start(())
            with CancelOnDisconnect(scope) as guard:
                try:
                    await self._send_frames(watcher, stream, Request(scope).headers["authorization"].encode())
                except ApiError as error:  # the key was revoked, or has expired
                    await stream.event(error.envelope())
                guard.disarm()
                await stream.end()

    async def _send_frames(self, watcher: Watcher, stream: EventStream, header: bytes) -> None:
        """Send frames until this gateway drains. Raises Unauthorized once the key is not valid any more."""
        clock, limiter, auth = self.services.clock, self.services.limiter, self.services.auth
        settings = self.services.settings.streams
        check_s = clock.monotonic_s() + settings.key_check_s
        while limiter.phase is ServingPhase.SERVING:
            frame = await watcher.next(_LOOK_S)
            if frame is not None:
                await stream.event(frame)
                if self.once:
                    return
            elif stream.quiet_s > settings.keepalive_s:
                await stream.comment("keepalive")
            if clock.monotonic_s() >= check_s:
                check_s = clock.monotonic_s() + settings.key_check_s
                with suppress(StateUnavailable):  # it was valid, and is looked up again
                    await auth.authenticate(header)
