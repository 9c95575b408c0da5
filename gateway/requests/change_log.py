"""The audit log of changes through the HTTP API, kept by the layer that routes requests.

A change is recorded before its handler runs, and refused (503) if that fails; the outcome follows. So a
record without an outcome is a change that runs, or one of which the gateway died: it may have taken effect.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.core.audit_writer import MAX_TARGET, AuditWriter
from gateway.core.errors import ApiError, TooMany, translate
from gateway.core.request_context import RequestContext, request_context
from gateway.core.rights import Right, may
from gateway.core.settings import RequestLimits
from gateway.http.drain import GatewayDraining
from gateway.http.limits import ClientGone, decode, read_body
from gateway.http.metrics import Metrics
from gateway.schemas.operations import Audit, Handler, Operation
from rdmacast.aio.eager import Ready
from rdmacast.aio.shielded import run_shielded
from registry.clock import Clock
from registry.records.audit import AuditEntry

T = TypeVar("T")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MAX_FIELDS = 24
_MAX_FIELD_NAME = 48
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# In this time: refusals of known keys that are recorded, of each and in all, and changes of a tenant.
_WINDOW_S = 60.0
_MAX_REFUSALS = 20
_MAX_TENANT_CHANGES = 120
CLIENT_GONE = 499


@dataclass(slots=True)
class _RefusalBudget:
    """The refusals of the present minute, so that no caller can fill the log with them."""

    since_s: float = float("-inf")
    keys: set[str] = field(default_factory=set)

    def admit(self, key_id: str, now_s: float) -> bool:
        """Return whether a refusal of this key may be recorded now."""
        if now_s - self.since_s >= _WINDOW_S:
            self.since_s, self.keys = now_s, set()
        if key_id in self.keys or len(self.keys) >= _MAX_REFUSALS:
            return False
        self.keys.add(key_id)
        return True


@dataclass(slots=True)
class _TenantBudgets:
    """The changes of each tenant in the present minute, so that none pushes others' out of the log."""

    since_s: float = float("-inf")
    changes: Counter[str] = field(default_factory=Counter)

    def take(self, tenant: str, now_s: float) -> None:
        """Count a change. Raises TooMany."""
        if now_s - self.since_s >= _WINDOW_S:
            self.since_s, self.changes = now_s, Counter()
        if self.changes[tenant] >= _MAX_TENANT_CHANGES:
            left_s = self.since_s + _WINDOW_S - now_s
            message = f"more than {_MAX_TENANT_CHANGES} changes of {tenant} in a minute"
            raise TooMany(message, code="rate_limit_exceeded", retry_after_s=ceil(left_s))
        self.changes[tenant] += 1


class ChangeLog:
    """The writer of the audit log of one gateway."""

    def __init__(self, writer: AuditWriter, clock: Clock, metrics: Metrics, limits: RequestLimits) -> None:
        self._writer = writer
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._refusals = _RefusalBudget()
        self._tenants = _TenantBudgets()

    def recorded(self, operation: Operation[Any], handler: Handler) -> Handler:
        """Return the handler of an operation, with its calls recorded if it makes changes."""
        audit = operation.audit
        if audit is None:
            return handler

        async def handle(request: Request) -> object:
            key = request_context(request.scope).caller
            if not may(key, Right.ADMIN):
                if operation.streamed_body:  # bytes without a name: the deploy that uses them is recorded
                    return await handler(request)
                self._tenants.take(key.tenant, self._clock.monotonic_s())
            entry, request = await self._described_with_body(operation, audit, request)
            await self._writer.begin(entry)
            change = _Change(self._writer, entry.id, request_context(request.scope))
            result: Any = await change.watch(handler(request))
            if callable(result) and not isinstance(result, Response):
                return _WatchedApp(result, change)
            status = result.status_code if callable(result) else operation.status
            await change.end(status, made=str(getattr(result, audit.made)) if audit.made else "")
            return result

        return handle

    async def note_refused(self, audit: Audit, scope: Scope, context: RequestContext, status: int) -> None:
        """Count a refused change, and record that of a known key within bounds."""
        if status not in (401, 403):
            return
        self._metrics.refused_changes[str(status),] += 1
        key = context.key
        if key is not None and self._refusals.admit(key.id, self._clock.monotonic_s()):
            entry = self._described(audit, scope, context)
            await self._writer.note_refused(entry, status, context.error_code)

    async def _described_with_body(
        self, operation: Operation[Any], audit: Audit, request: Request
    ) -> tuple[AuditEntry, Request]:
        """Return the entry of a request, and the request with its body to be read again."""
        entry = self._described(audit, request.scope, request_context(request.scope))
        if operation.streamed_body:
            return entry, request
        body = await read_body(request.scope, request.receive, self._limits)
        request = Request(request.scope, _replayed(body, request.receive))
        try:
            given = decode(body, _FIELDS, self._limits) if body else {}
            target = entry.target or _text(given.get(audit.target))
            fields = dict(islice(_sizes(given), _MAX_FIELDS))
        except (ApiError, msgspec.DecodeError, UnicodeDecodeError):  # the handler refuses it
            return entry, request
        return replace(entry, target=target, fields=fields), request

    def _described(self, audit: Audit, scope: Scope, context: RequestContext) -> AuditEntry:
        key, client = context.key, scope.get("client")
        return AuditEntry(
            id=context.request_id,
            at=context.received_at,
            gateway=self._writer.gateway,
            operation=audit.operation,
            target=_printable("/".join(scope.get("path_params", {}).values())),
            key_id=key.id if key else "",
            tenant=key.tenant if key else "",
            role=key.role.value if key else "",
            address=str(client[0]) if client else "",
            client_request_id=context.client_request_id,
        )


@dataclass(frozen=True, slots=True)
class _Change:
    """A change under way."""

    writer: AuditWriter
    entry_id: str
    context: RequestContext

    async def end(self, status: int, *, code: str = "", made: str = "") -> None:
        """Record the outcome, also where the request is cancelled meanwhile."""
        code = code or self.context.error_code
        await run_shielded(self.writer.end(self.entry_id, status, code=code, made=made))

    async def watch(self, work: Awaitable[T]) -> T:
        """Return the result of a part of the request; an exception of it is the outcome."""
        try:
            return await work
        except BaseException as error:
            known = _failure(error)
            await self.end(known.status, code=known.code)
            raise


@dataclass(frozen=True, slots=True)
class _WatchedApp:
    """A response in parts, at the end of which the outcome is recorded."""

    app: ASGIApp
    change: _Change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self.change.watch(self.app(scope, receive, noting))
        await self.change.end(status)


def _failure(error: BaseException) -> ApiError:
    """Return the error with which a request ends that raised this."""
    if isinstance(error, ClientGone):
        return ApiError(CLIENT_GONE, "client_gone", "")
    if not isinstance(error, Exception):
        return GatewayDraining()
    return translate(error) or ApiError(500, "internal", "")


def _replayed(body: bytes, rest: Receive) -> Receive:
    """Return a `receive` which begins with a body that was read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    def receive() -> Awaitable[Message]:
        return Ready(messages.pop()) if messages else rest()

    return receive


def _sizes(given: Mapping[str, msgspec.Raw], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the names of fields, and of fields of these, with the sizes of their values."""
    for name, raw in given.items():
        shown = prefix + (name if _FIELD_NAME.fullmatch(name) else "?")
        value = bytes(raw)
        if value.startswith(b"{") and not prefix:
            yield from _sizes(_FIELDS.decode(value), f"{shown}.")
        else:
            yield shown[:_MAX_FIELD_NAME], len(value)


def _text(raw: msgspec.Raw | None) -> str:
    if raw is None:
        return ""
    try:
        return _printable(msgspec.json.decode(raw, type=str))
    except msgspec.ValidationError:
        return ""


def _printable(target: str) -> str:
    """Return a name for a terminal, too: anything else could rewrite what an admin sees there."""
    target = target[:MAX_TARGET]
    return target if target.isprintable() else ascii(target)[:MAX_TARGET]
