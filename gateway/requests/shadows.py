"""Shadow requests: copies of requests that a version which is being rolled out runs, and nobody reads.

A copy is sent once its original has been answered, so that it delays nothing of it. It passes through the
same handler. Its record is that of the function's owner, who ordered the rollout: the caller does not pay.
"""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope

from gateway.core.errors import translate
from gateway.core.ids import new_request_id
from gateway.core.request_context import RequestContext, attach
from gateway.http.disconnect import CONNECTION_END, ConnectionEnd
from gateway.http.drain import InFlightLimiter, ServingPhase
from gateway.http.metrics import Metrics
from gateway.requests.functions import FunctionResolver
from gateway.requests.routing import Endpoint
from rdmacast.aio.eager import COMPLETED, Ready
from rdmacast.aio.groups import cancel_and_discard
from registry.clock import Clock
from registry.config.secrets import ADMIN_TENANT
from registry.records.api_key import ApiKey, KeyRole

_log = logging.getLogger("hypercast.gateway")

SHADOW_KEY = "shadow"  # key id of their records
MAX_SHADOWS = 64  # in flight on a gateway; further ones are not made
MAX_BODY_BYTES = 256 << 10
MAX_BODIES_BYTES = 32 << 20  # of all copies, also of requests that are still being answered
_MAX_S = 300.0
_SECRET_HEADERS = (b"authorization", b"cookie")


class BodyCopy:
    """A request's `receive`, which keeps a copy of its body as long as there is room for it."""

    def __init__(self, receive: Receive, room: "_Room") -> None:
        self._receive = receive
        self._room = room
        self._parts: list[bytes] | None = []  # None: too large
        self._nbytes = 0
        self._complete = False

    def __repr__(self) -> str:
        return f"<BodyCopy {self._nbytes} bytes complete={self._complete}>"

    def take(self) -> bytes | None:
        """Return the whole body, None if it was not read to its end or is too large; its room stays taken."""
        return b"".join(self._parts) if self._complete and self._parts is not None else None

    def release(self) -> None:
        """Free its room."""
        self._room.nbytes -= self._nbytes
        self._nbytes, self._parts = 0, None

    def receive(self) -> Awaitable[Message]:
        """Receive a message of the request."""
        received = self._receive()
        if isinstance(received, Ready):
            self._note(received.value)
            return received
        return self._noted(received)

    async def _noted(self, received: Awaitable[Message]) -> Message:
        message = await received
        self._note(message)
        return message

    def _note(self, message: Message) -> None:
        if message["type"] != "http.request":
            return
        part: bytes = message.get("body", b"")
        self._complete = not message.get("more_body", False)
        if self._parts is None:
            return
        if self._nbytes + len(part) > MAX_BODY_BYTES or self._room.nbytes + len(part) > MAX_BODIES_BYTES:
            self.release()
            return
        self._nbytes += len(part)
        self._room.nbytes += len(part)
        self._parts.append(part)


@dataclass(slots=True)
class _Room:
    """The bytes of all copies that are kept."""

    nbytes: int = 0


class ShadowRequests:
    """The shadow requests of one gateway."""

    def __init__(
        self, functions: FunctionResolver, limiter: InFlightLimiter, metrics: Metrics, clock: Clock
    ) -> None:
        self._functions = functions
        self._limiter = limiter
        self._metrics = metrics
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = _Room()

    def __repr__(self) -> str:
        return f"<ShadowRequests {len(self._tasks)} in flight>"

    def copy(self, receive: Receive, context: RequestContext) -> BodyCopy | None:
        """Return a `receive` that keeps a copy for `send`, to be released; None if none will be needed."""
        if not self._functions.may_be_shadowed(context.request_id):
            return None
        return BodyCopy(receive, self._room)

    def send(self, endpoint: Endpoint, scope: Scope, copy: BodyCopy, context: RequestContext) -> None:
        """Send a copy of an answered request, if its context names a version for it and there is room."""
        if not context.shadow_version or self._limiter.phase is ServingPhase.DRAINING:
            return
        body = copy.take()
        if body is None or len(self._tasks) >= MAX_SHADOWS:
            self._metrics.shadows[context.function, "dropped"] += 1
            return
        task = asyncio.create_task(self._run(endpoint, scope, body, context), name="shadow request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """End those in flight."""
        await cancel_and_discard(*self._tasks)

    async def _run(self, endpoint: Endpoint, scope: Scope, body: bytes, context: RequestContext) -> None:
        shadow = self._context(context)
        statuses: list[int] = []
        copied = {
            **{name: scope[name] for name in _COPIED if name in scope},
            "headers": [pair for pair in scope["headers"] if pair[0] not in _SECRET_HEADERS],
            CONNECTION_END: ConnectionEnd(asyncio.get_running_loop()),
        }
        attach(copied, shadow)

        def discard(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            return COMPLETED

        try:
            async with asyncio.timeout(_MAX_S):
                await endpoint(copied, _replay(body), discard)
        except Exception as error:  # no client waits for it: those that are no refusals are logged whole
            known = translate(error, scope["path"])
            statuses.append(500 if known is None else known.status)
            if known is None:
                _log.exception("shadow request %s of %s failed", shadow.request_id, context.request_id)
            else:
                _log.info("shadow request %s of %s: %s", shadow.request_id, context.request_id, known)
        is_good = bool(statuses) and statuses[-1] < 400 and not shadow.error_code  # that of a stream
        outcome = "ok" if is_good else "failed"
        self._metrics.shadows[context.function, outcome] += 1

    def _context(self, context: RequestContext) -> RequestContext:
        tenant = self._functions.owner(context.function) or ADMIN_TENANT
        key = ApiKey(
            id=SHADOW_KEY, digest="", tenant=tenant, role=KeyRole.CALLER, name=SHADOW_KEY, created_at=0.0
        )
        return RequestContext(
            request_id=new_request_id(),
            client_request_id=context.request_id,
            received_at=self._clock.wall_s(),
            received_s=self._clock.monotonic_s(),
            key=key,
            pinned_version=context.shadow_version,
        )


_COPIED = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string"),
    *("path_params", "client", "server"),
)


def _replay(body: bytes) -> Receive:
    """Return a `receive` with this body, after which nothing comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    def receive() -> Awaitable[Message]:
        if messages:
            return Ready(messages.pop())
        return asyncio.get_running_loop().create_future()

    return receive
