"""The calls of one request, and their one record in the ledger."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from gateway.billing.request_record import BillingFailed, completion_tokens, prompt_tokens
from gateway.core.contract import Assigned, DispatchError, FunctionCall, Work
from gateway.core.open_call import OpenCall
from gateway.core.request_context import RequestContext
from gateway.core.request_trace import RequestTrace
from gateway.http.limits import ClientGone
from gateway.requests.services import Services
from gateway.requests.spans import call_spans
from gateway.tenants.cost_estimates import WorkBound
from registry.messages.node import InvokeHandler
from registry.records.function import FunctionVersion
from registry.records.instance import StartKind
from registry.records.usage import RequestStatus

T = TypeVar("T")
_ONE_CALL = WorkBound()


class BilledRequest:
    """The calls of one request, billed exactly once.

    Call `complete()` before the response's last byte. Leaving the context without it writes the record as
    cancelled (the client or a deadline ended it) or failed. `bound` is what it may compute; with `streams`
    each output is delivered at once. Raises on entry Unavailable while nothing could be billed, and TooMany
    if the key's spend limit is reserved.
    """

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        version: FunctionVersion,
        bound: WorkBound = _ONE_CALL,
        *,
        streams: bool = False,
    ) -> None:
        self._services = services
        self.context = context
        self.version = version
        self._bound = bound
        self._streams = streams
        self.runs: list[OpenCall] = []
        self.assigned: Assigned | None = None
        self._held = False
        self._billed = False

    def __repr__(self) -> str:
        return f"<BilledRequest {self.context.request_id} {self.version.function} runs={self.runs!r}>"

    async def __aenter__(self) -> Self:
        if not self._services.health.alive:
            self._services.health.require_alive()
        self.context.set_version(self.version)
        if self.context.caller.spend_limit_nanos is not None:
            await self._services.quotas.reserve(self.context, self.version, self._bound)
        self._hold(True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            self._hold(False)
        if self._billed:
            return
        try:
            await self._bill(RequestStatus.CANCELLED if self._is_owed(error) else RequestStatus.FAILED)
        except BillingFailed:
            # The record is in the outbox; the error that ended the request is the better one for the client.
            if kind is None:
                raise

    def _is_owed(self, error: BaseException | None) -> bool:
        """Return whether what it delivered before this error is billed."""
        if isinstance(error, asyncio.CancelledError | ClientGone | GeneratorExit):
            return True
        return isinstance(error, DispatchError) and any(
            run.outputs
            and not run.failed
            and (self._streams or run.overran or isinstance(run.call.work, InvokeHandler))
            for run in self.runs
        )

    def run(self, work: Work, prefix: int = 0) -> OpenCall:
        """Return a further call of this request, to be entered by the caller."""
        trace, span = self.context.trace, None
        if trace is not None:
            span = trace.own.child()
            work = msgspec.structs.replace(work, trace=span.message())
        call = FunctionCall(
            request_id=work.request_id,
            tenant=self.context.caller.tenant,
            version=self.version,
            work=work,
            deadlines=self._services.settings.deadlines,
            prefix=prefix,
            most_tokens=self._bound.prompt_tokens + self._bound.completion_tokens,
            span=span,
            background=self.context.bill is not None,
        )
        run = self._services.dispatcher.run(call)
        self.runs.append(run)
        return run

    def next_call_id(self) -> str:
        """Return the id of the next call, unlike those of other attempts."""
        attempt = f"{self.context.attempt}." if self.context.attempt else ""
        return f"{self.context.request_id}/{attempt}{len(self.runs)}"

    def note_assigned(self, assigned: Assigned) -> bool:
        """Record the assignment of a call; return whether it was the request's first call.

        The first call may be assigned again before its first output: the last assignment counts.
        """
        first = self.assigned is None
        if not first and self.runs[0].assigned is not assigned:
            return False
        self.assigned = assigned
        self.context.start_kind = assigned.start_kind
        self.context.node = assigned.node
        if not first:
            return False
        self._hold(False)
        if assigned.start_kind == StartKind.COLD:
            self._services.metrics.cold_starts[self.version.function,] += 1
        return True

    def complete(self) -> Awaitable[None]:
        """Write the request's record as good. Raises BillingFailed."""
        return self._bill(RequestStatus.OK)

    def headers(self, *, final: bool) -> list[tuple[bytes, bytes]]:
        """Return x-function-version and, as far as known, x-start-kind and Server-Timing."""
        version = (b"x-function-version", b"%d" % self.version.version)
        if self.assigned is None:
            return [version]
        kind = (b"x-start-kind", self.assigned.start_kind.encode())
        return [version, kind, (b"server-timing", self.timing(final=final).encode())]

    def timing(self, *, final: bool) -> str:
        """Return the Server-Timing value: queue, load, the start's phases, and with `final` exec."""
        assigned = self.assigned
        if assigned is None:
            return ""
        text = f"queue;dur={assigned.queue_ms:.1f}, load;dur={assigned.load_ms:.1f}"
        for phase, duration_ms in assigned.phases_ms.items():
            text += f", {phase};dur={duration_ms:.1f}"
        return f"{text}, exec;dur={self._exec_ms:.1f}" if final else text

    @property
    def _exec_ms(self) -> float:
        longest = 0.0
        for run in self.runs:
            longest = max(longest, run.exec_ms)
        return longest

    def facts(self) -> dict[str, object]:
        """Return the `hypercast` object of a stream's last chunk: facts that the head may lack."""
        assigned = self.assigned
        return {
            "request_id": self.context.request_id,
            "version": self.version.version,
            "x_start_kind": assigned.start_kind if assigned else None,
            "node": assigned.node if assigned else None,
            "queue_ms": round(assigned.queue_ms, 1) if assigned else None,
            "load_ms": round(assigned.load_ms, 1) if assigned else None,
            "exec_ms": round(self._exec_ms, 1),
        }

    async def _bill(self, status: RequestStatus) -> None:
        self._billed = True
        self._measure(status)
        quotas, has_lease = self._services.quotas, self.context.lease is not None
        budgeted = has_lease and self.context.caller.spend_limit_nanos is not None
        if self.context.bill is not None:  # the gateway that records it releases the lease
            self._services.biller.defer(self.context, self.version, self.runs, status, self.context.bill)
            self._learn()
            return
        if has_lease and not budgeted:
            quotas.release(self.context)
        record = await self._services.biller.bill(self.context, self.version, self.runs, status)
        if record is not None:
            self._services.metrics.note_billed(record)
        if status is RequestStatus.OK:  # what failed may have used nothing
            self._learn()
        if budgeted:  # its lease holds the reservation until the cost is in the sums
            quotas.release(self.context)
        if has_lease:
            await quotas.wait_released(self.context)

    def _learn(self) -> None:
        if self.assigned is not None:
            gpu_us = sum(use.gpu.gpu_us for run in self.runs for use in run.used)
            work = WorkBound(
                calls=len(self.runs),
                prompt_tokens=prompt_tokens(self.runs),
                completion_tokens=completion_tokens(self.runs),
            )
            self._services.quotas.learn(self.version, self.assigned.gpu_type, gpu_us, work)

    def _measure(self, status: RequestStatus) -> None:
        for run in self.runs:
            self._services.metrics.note_call(self.version.function, self.context.start_kind, run, status)
        if self.context.trace is not None:
            self._record_spans(self.context.trace)

    def _record_spans(self, trace: RequestTrace) -> None:
        for run in self.runs:
            for span in call_spans(run, self.context, trace):
                trace.tracer.record(span)

    def _hold(self, held: bool) -> None:
        if held is not self._held:
            self._held = held
            waiting = self._services.metrics.held
            (waiting.enter if held else waiting.leave)(self.version.function, self.context.request_id)


async def run_all(
    items: Sequence[T], each: Callable[[T], Awaitable[None]], *, at_once: int | None = None
) -> None:
    """Run `each` for all items, at most `at_once` concurrently; the first error cancels the others."""
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
