"""One request's calls, from the first to the bill."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from gateway.billing import BillingFailed
from gateway.callrun import CallRun
from gateway.contract import Assigned, Call
from gateway.exchange import Exchange
from gateway.ids import call_id
from gateway.limits import ClientGone
from gateway.services import Services
from registry.function import FunctionVersion
from registry.instance import StartKind
from registry.messages import Compute, Generate, InvokeHandler
from registry.usage import RequestStatus

T = TypeVar("T")


class Job:
    """Runs calls for one request and settles its bill exactly once.

    The good way out is `settle()` before the response's last byte. Leaving without it writes the
    record as cancelled (the client left) or failed. Raises Unavailable on entry while nothing could
    be billed.
    """

    def __init__(self, services: Services, exchange: Exchange, version: FunctionVersion) -> None:
        self._services = services
        self.exchange = exchange
        self.version = version
        self.runs: list[CallRun] = []
        self.assigned: Assigned | None = None
        self._held = False
        self._settled = False

    def __repr__(self) -> str:
        return f"<Job {self.exchange.request_id} {self.version.function} runs={self.runs!r}>"

    async def __aenter__(self) -> Self:
        self._services.pulse.require()
        self.exchange.concerns(self.version)
        self._hold(True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hold(False)
        if self._settled:
            return
        left = kind is not None and issubclass(kind, asyncio.CancelledError | ClientGone | GeneratorExit)
        try:
            await self._bill(RequestStatus.CANCELLED if left else RequestStatus.FAILED)
        except BillingFailed:
            # The record is in the log; what ended the request is the better error for the client.
            if kind is None:
                raise

    def run(self, work: Generate | Compute | InvokeHandler) -> CallRun:
        """A further call of this request, to be entered by the caller."""
        call = Call(
            request_id=work.request_id,
            tenant=self.exchange.caller.tenant,
            version=self.version,
            work=work,
            deadlines=self._services.settings.deadlines,
        )
        run = CallRun(self._services.dispatcher, call)
        self.runs.append(run)
        return run

    def next_call_id(self) -> str:
        """Ids of one request's calls differ in their number alone, so that each leads to its record."""
        if not self.runs:
            return call_id(self.exchange.request_id, 0)
        first = self.runs[0].call.work.request_id
        return f"{self.exchange.request_id}/{len(self.runs)}-{first.rpartition('-')[2]}"

    def note_assigned(self, assigned: Assigned) -> bool:
        """Note that an instance took a call; says whether it was the request's first.

        Another instance may take the first call over before its first output: then that one counts.
        """
        first = self.assigned is None
        if not first and self.runs[0].assigned is not assigned:
            return False
        self.assigned = assigned
        self.exchange.start_kind = assigned.start_kind
        self.exchange.node = assigned.node
        if not first:
            return False
        self._hold(False)
        if assigned.start_kind == StartKind.COLD:
            self._services.metrics.cold_starts.labels(self.version.function).inc()
        return True

    async def settle(self) -> None:
        """Write the request's record as good. Raises BillingFailed."""
        await self._bill(RequestStatus.OK)

    def headers(self, *, final: bool) -> list[tuple[str, str]]:
        """x-function-version and, as far as known, x-start-kind and Server-Timing."""
        headers = [("x-function-version", str(self.version.version))]
        if self.assigned is not None:
            headers.append(("x-start-kind", self.assigned.start_kind))
            headers.append(("server-timing", self.timing(final=final)))
        return headers

    def timing(self, *, final: bool) -> str:
        """The Server-Timing value: queue, load, the phases of the start waited for, and at the end exec."""
        if self.assigned is None:
            return ""
        parts = [f"queue;dur={self.assigned.queue_ms:.1f}", f"load;dur={self.assigned.load_ms:.1f}"]
        parts += [f"{phase};dur={took_ms:.1f}" for phase, took_ms in self.assigned.phases_ms.items()]
        if final:
            parts.append(f"exec;dur={max((run.exec_ms for run in self.runs), default=0.0):.1f}")
        return ", ".join(parts)

    def facts(self) -> dict[str, object]:
        """The `hypercast` object of a stream's last chunk: what its head may have been too early to say."""
        assigned = self.assigned
        return {
            "request_id": self.exchange.request_id,
            "version": self.version.version,
            "x_start_kind": assigned.start_kind if assigned else None,
            "node": assigned.node if assigned else None,
            "queue_ms": round(assigned.queue_ms, 1) if assigned else None,
            "load_ms": round(assigned.load_ms, 1) if assigned else None,
            "exec_ms": round(max((run.exec_ms for run in self.runs), default=0.0), 1),
        }

    async def _bill(self, status: RequestStatus) -> None:
        self._settled = True
        self._measure()
        self._services.quotas.leave(self.exchange)
        await self._services.biller.settle(self.exchange, self.version, self.runs, status)
        await self._services.quotas.left(self.exchange)

    def _measure(self) -> None:
        metrics, function = self._services.metrics, self.version.function
        for run in self.runs:
            if (first_s := run.first_output_after_s) is not None:
                metrics.first_token.labels(function, self.exchange.start_kind).observe(first_s)
            if (per_token_s := run.token_gap_s) is not None:
                metrics.per_token.labels(function).observe(per_token_s)

    def _hold(self, held: bool) -> None:
        if held is not self._held:
            self._held = held
            self._services.metrics.held.labels(self.version.function).inc(1 if held else -1)


async def together(
    items: Sequence[T], each: Callable[[T], Awaitable[None]], *, at_once: int | None = None
) -> None:
    """Do `each` for all items at once (or so many); the first failure cancels the others and is raised."""
    if len(items) == 1:
        await each(items[0])
        return
    slots = asyncio.Semaphore(at_once or len(items))

    async def one(item: T) -> None:
        async with slots:
            await each(item)

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(one(item))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
