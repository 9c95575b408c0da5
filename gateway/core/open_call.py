"""A call in progress: its events under its deadlines, with a running count of its output and usage."""

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol, Self, cast

from gateway.core.contract import (
    WAITS_FOR_NODE,
    Assigned,
    CallUsage,
    DispatchError,
    Event,
    FunctionCall,
    WaitStage,
)
from registry.messages.node import RequestUsage, Tokens

_STILL = frozenset({"queue", WAITS_FOR_NODE})  # stages in which no start makes progress


class OpenCall(ABC):
    """A context manager and async iterator over the events of one call, the last of which is RequestUsage.

    It enforces three independent limits: until the first output, between two outputs, and for the whole call.
    The first restarts whenever the start that the call waits for makes progress. Time that the reader takes
    between two events does not count as idle. The reader reports delivered tokens (`note_passed`).

    Entering raises DispatchError (admission). Leaving early cancels the call on its node at once, then waits
    briefly for the node's report of what the call used.
    """

    def __init__(self, call: FunctionCall) -> None:
        self.call = call
        self.stage = "queue"
        self.assigned: Assigned | None = None
        self.usage: RequestUsage | None = None
        self.tokens = 0
        self.passed_on = 0  # tokens that the reader has passed on
        self.outputs = 0
        self.failed = False  # for another reason than a deadline or its reader
        self.overran = False  # the limit of the whole call ended it
        self.first_output_s: float | None = None
        self._assigned_s: float | None = None
        self._ended_s: float | None = None
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._progress_s = self._started_s
        self._reached: dict[str, float] = {}
        self._reader: asyncio.Task[object] | None = None
        self._waiting: asyncio.Task[object] | None = None  # the reader, while it waits for an event
        self._waiting_since_s = self._started_s
        self._timer: asyncio.TimerHandle | None = None  # fires at the deadline, or before it has moved
        self._expired = False
        self._cancelling = 0  # of the reader, when its wait expired

    @property
    @abstractmethod
    def used(self) -> tuple[CallUsage, ...]:
        """What it used, an entry for each instance; final once it has been left."""

    @abstractmethod
    def _enter(self) -> None:
        """Admit the call. Raises DispatchError."""

    def _next_now(self) -> Event | None:
        """Return the next event if that needs no wait; None to have `_next` called."""
        return None

    @abstractmethod
    async def _next(self) -> Event:
        """Return the next event. Raises DispatchError, and StopAsyncIteration after the last."""

    @abstractmethod
    async def _leave(self) -> None:
        """End the call, wherever it is."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.call.request_id} stage={self.stage} tokens={self.tokens}>"

    async def __aenter__(self) -> Self:
        self._reader = cast("asyncio.Task[object]", asyncio.current_task(self._loop))
        self._enter()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.failed = isinstance(error, DispatchError) and error.code != "timeout"
        self._ended_s = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
        await self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event. Raises DispatchError, also at its deadline.

        As asyncio.timeout does, the timer cancels the task and its cancellation is taken back here. There is
        one timer for all waits of the call, since most events arrive long before their deadline.
        """
        event = self._next_now()
        if event is None:
            task = self._waiting = self._reader
            assert task is not None, "not entered"
            self._waiting_since_s = self._loop.time()
            if self._timer is None:
                self._set_timer(self._waiting_since_s)
            try:
                event = await self._next()
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
                self._note_output()
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
                self._note_output()
        return event

    def note_passed(self, tokens: int) -> None:
        """Count tokens that were written to the client's connection or to the buffered response."""
        self.passed_on += tokens

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
        now_s = self._loop.time()
        if now_s < self._deadline_s():
            self._set_timer(now_s)
        else:
            self._expired, self._cancelling = True, self._waiting.cancelling()
            self._waiting.cancel()

    def _set_timer(self, now_s: float) -> None:
        # No later than the deadline of a wait that begins now may be, once there is an output.
        idle_until_s = now_s + self.call.deadlines.idle_s
        self._timer = self._loop.call_at(min(self._deadline_s(), idle_until_s), self._on_timer)

    def _note_progress(self, event: WaitStage) -> None:
        # A start that fails and is retried repeats its stages; only a new maximum is progress, so failing
        # starts cannot hold a call forever.
        if event.stage in _STILL or event.fraction <= self._reached.get(event.stage, -1.0):
            return
        self._reached[event.stage] = event.fraction
        self._progress_s = self._loop.time()

    def _note_output(self) -> None:
        self.outputs += 1
        if self.first_output_s is None:
            self.first_output_s = self._loop.time()

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
            self.overran = True
            limit = f"the limit for the whole request is {limits.total_s:g} s"
        elif self.outputs:
            limit = f"the limit until the next output is {limits.idle_s:g} s"
        else:
            limit = f"the limit until the first output or progress of the start is {limits.start_s:g} s"
        stage = "output" if self.outputs else self.stage
        return DispatchError("timeout", f"timed out in stage {stage!r}: {limit}", status=504)


class Dispatcher(Protocol):
    """Runs calls on instances."""

    def run(self, call: FunctionCall) -> OpenCall:
        """Return the call, to be entered and read by one task."""
        ...
