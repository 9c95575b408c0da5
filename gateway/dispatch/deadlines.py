"""A call under its deadlines, with a running count of its output and usage."""

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self, TypeVar, cast

from gateway.core.contract import (
    WAITS_FOR_NODE,
    Assigned,
    CallUsage,
    Dispatcher,
    DispatchError,
    Event,
    FunctionCall,
    OpenCall,
    WaitStage,
)
from rdmacast.aio.eager import StartedCoroutine, start_eagerly
from rdmacast.aio.time_limit import TimeLimit
from registry.messages.node import RequestUsage, Tokens

T = TypeVar("T")

_STILL = frozenset({"queue", WAITS_FOR_NODE})  # stages in which no start makes progress


class DeadlinedCall:
    """A context manager and async iterator over the events of one call.

    It enforces three independent limits: until the first output, between two outputs, and for the whole call.
    The first restarts whenever the start that the call waits for makes progress. Time that the reader takes
    between two events does not count as idle. The reader reports delivered tokens (`note_passed`).
    """

    def __init__(self, dispatcher: Dispatcher, call: FunctionCall) -> None:
        self.call = call
        self.stage = "queue"
        self.assigned: Assigned | None = None
        self.usage: RequestUsage | None = None
        self.tokens = 0
        self.passed_on = 0  # tokens that the reader has passed on
        self.outputs = 0
        self.first_output_s: float | None = None
        self._assigned_s: float | None = None
        self._ended_s: float | None = None
        self._opened: AbstractAsyncContextManager[OpenCall] | None = None
        self._events: OpenCall | None = None
        self._dispatcher = dispatcher
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._progress_s = self._started_s
        self._reached: dict[str, float] = {}
        self._waiting: asyncio.Task[object] | None = None  # the reader, while it waits for an event
        self._waiting_since_s = self._started_s
        self._timer: asyncio.TimerHandle | None = None  # fires at the deadline, or before it has moved
        self._expired = False
        self._cancelling = 0  # of the reader, when its wait expired

    def __repr__(self) -> str:
        return f"<DeadlinedCall {self.call.request_id} stage={self.stage} tokens={self.tokens}>"

    async def __aenter__(self) -> Self:
        opened = self._dispatcher.run(self.call)
        started = start_eagerly(opened.__aenter__())
        self._events = await self._in_time(started) if isinstance(started, StartedCoroutine) else started
        self._opened = opened
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_s = self._loop.time()
        self._stop_timer()
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event. Raises DispatchError at its deadline.

        As asyncio.timeout does, the timer cancels the task and its cancellation is taken back here. There is
        one timer for all waits of the call, since most events arrive long before their deadline.
        """
        assert self._events is not None
        self._waiting_since_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline_s(), self._on_timer)
        task = self._waiting = cast("asyncio.Task[object]", asyncio.current_task())
        try:
            event = await self._events.__anext__()
        except asyncio.CancelledError:
            if self._expired and task.cancelling() == self._cancelling + 1:
                raise self._timed_out() from None
            raise
        finally:
            self._waiting = None
            if self._expired:
                self._expired = False
                task.uncancel()
        match event:
            case Tokens(ids=ids):
                self._output()
                self.tokens += len(ids)
            case WaitStage(stage=stage):
                self.stage = stage
                self._note_progress(event)
            case Assigned():
                self.assigned = event
                self._assigned_s = self._loop.time()
                self.stage = "first output"
            case RequestUsage():
                self.usage = event
            case _:
                self._output()
        return event

    def note_passed(self, tokens: int) -> None:
        """Count tokens that were written to the client's connection or to the buffered response."""
        self.passed_on += tokens

    @property
    def used(self) -> tuple[CallUsage, ...]:
        """What it used, an entry for each instance; final once it has been left."""
        return () if self._events is None else self._events.used

    @property
    def assigned_ago_s(self) -> float:
        """From its assignment until now."""
        return 0.0 if self._assigned_s is None else self._loop.time() - self._assigned_s

    @property
    def first_output_after_s(self) -> float | None:
        """From the call's begin to its first output, None if there was none."""
        return None if self.first_output_s is None else self.first_output_s - self._started_s

    @property
    def token_gap_s(self) -> float | None:
        """Mean time between tokens, None for fewer than two."""
        if self.tokens < 2 or self.first_output_s is None:
            return None
        ended_s = self._ended_s or self._loop.time()
        return (ended_s - self.first_output_s) / (self.tokens - 1)

    @property
    def exec_ms(self) -> float:
        """The node's own figure, or from the assignment to the end."""
        if self.usage is not None:
            return self.usage.exec_us / 1000
        if self._assigned_s is None:
            return 0.0
        ended_s = self._ended_s or self._loop.time()
        return (ended_s - self._assigned_s) * 1000

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiting is None:
            return  # the next wait sets it again
        deadline_s = self._deadline_s()
        if self._loop.time() < deadline_s:
            self._timer = self._loop.call_at(deadline_s, self._on_timer)
        else:
            self._expired, self._cancelling = True, self._waiting.cancelling()
            self._waiting.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _in_time(self, started: StartedCoroutine[T]) -> T:
        """Await the rest of it. Raises DispatchError at its deadline."""
        try:
            with TimeLimit(self._deadline_s() - self._loop.time()):
                return await started
        except TimeoutError:
            raise self._timed_out() from None

    def _note_progress(self, event: WaitStage) -> None:
        # A start that fails and is retried repeats its stages; only a new maximum is progress, so failing
        # starts cannot hold a call forever.
        if event.stage in _STILL or event.fraction <= self._reached.get(event.stage, -1.0):
            return
        self._reached[event.stage] = event.fraction
        self._progress_s = self._loop.time()

    def _output(self) -> None:
        self.outputs += 1
        if self.first_output_s is None:
            self.first_output_s = self._loop.time()
            self._stop_timer()  # the next deadline may be earlier

    def _deadline_s(self) -> float:
        limits = self.call.deadlines
        next_s = self._waiting_since_s + limits.idle_s if self.outputs else self._progress_s + limits.start_s
        return min(next_s, self._started_s + limits.total_s)

    def _timed_out(self) -> DispatchError:
        if self.stage == WAITS_FOR_NODE and not self.outputs:
            return DispatchError(
                "no_nodes", "no node is available to serve the call", status=503, retry_after_s=5
            )
        limits = self.call.deadlines
        passed = self._loop.time() - self._started_s
        if passed >= limits.total_s:
            limit = f"the limit for the whole request is {limits.total_s:g} s"
        elif self.outputs:
            limit = f"the limit until the next output is {limits.idle_s:g} s"
        else:
            limit = f"the limit until the first output or progress of the start is {limits.start_s:g} s"
        stage = "output" if self.outputs else self.stage
        return DispatchError("timeout", f"timed out in stage {stage!r}: {limit}", status=504)
