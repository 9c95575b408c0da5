"""A call in progress: its events under its deadlines, with a running count of its output and usage."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from functools import cached_property
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
from registry.messages.forward import ForwardedChunk, ForwardedHead, ForwardRequest
from registry.messages.node import HandlerChunk, RequestUsage, Tokens

_CHECK_EVERY_S = 0.02
_STILL = frozenset({"queue", WAITS_FOR_NODE})  # stages in which no start makes progress


class DeadlineTimer:
    """One timer for the deadlines of all open calls: most calls end long before theirs."""

    def __init__(self) -> None:
        self.calls: set[OpenCall] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = math.inf

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of all its calls: to look it up costs a system call each time."""
        return asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<DeadlineTimer {len(self.calls)} calls>"

    def add(self, call: "OpenCall", at_s: float) -> None:
        """Check the call at `at_s` or before, until it is taken out of `calls`."""
        self.calls.add(call)
        if at_s < self._at_s:
            self._set(at_s)

    def _set(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._at_s = at_s
        self._timer = self.loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._at_s = None, math.inf
        now_s = self.loop.time()
        checked = [(call, call.check_deadline(now_s)) for call in self.calls]
        self.calls = {call for call, at_s in checked if at_s < math.inf}
        if self.calls:
            # Not once a millisecond, where many calls are due one after the other.
            self._set(max(min([at_s for _, at_s in checked]), now_s + _CHECK_EVERY_S))


class OpenCall(ABC):
    """A context manager and async iterator over the events of one call.

    The last of them is RequestUsage, or a HandlerChunk that has it.

    It enforces three independent limits: until the first output, between two outputs, and for the whole call.
    The first restarts whenever the start that the call waits for makes progress. Time that the reader takes
    between two events does not count as idle. The reader reports delivered tokens (`note_passed`).

    Entering raises DispatchError (admission). Leaving early cancels the call on its node at once, then waits
    briefly for the node's report of what the call used.
    """

    stage = "queue"
    assigned: Assigned | None = None
    usage: RequestUsage | None = None
    tokens = 0
    prompt_tokens = 0  # as another engine has counted them so far
    passed_on = 0  # tokens that the reader has passed on
    outputs = 0
    finish_reason = ""  # of its last tokens
    failed = False  # for another reason than a deadline or its reader
    is_error = False  # it ended by a fault of the platform or the function, or at a deadline
    overran = False  # the limit of the whole call ended it
    first_output_s: float | None = None
    _assigned_s: float | None = None
    _head_came = False  # of a request that passes through
    _ended_s: float | None = None
    _reader: asyncio.Task[object] | None = None
    _waiting: asyncio.Task[object] | None = None  # the reader, while it waits for an event
    _is_timed = False
    _expired = False
    _cancelling = 0  # of the reader, when its wait expired

    def __init__(self, call: FunctionCall, timer: DeadlineTimer) -> None:
        self.call = call
        self._timer = timer
        self._loop = timer.loop
        self._started_s = self._progress_s = self._waiting_since_s = self._loop.time()
        self._reached: dict[str, float] = {}

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
    def _leave(self) -> Awaitable[None] | None:
        """End the call, wherever it is; return the rest of that, if it has to wait."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.call.request_id} stage={self.stage} tokens={self.tokens}>"

    async def __aenter__(self) -> Self:
        self._reader = cast("asyncio.Task[object]", asyncio.current_task(self._loop))
        self._enter()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.failed = isinstance(error, DispatchError) and error.code != "timeout"
        self.is_error = isinstance(error, DispatchError) and error.status >= 500
        self._ended_s = self._loop.time()
        self._timer.calls.discard(self)
        if (rest := self._leave()) is not None:
            await rest

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event. Raises DispatchError, also at its deadline.

        As asyncio.timeout does, the timer cancels the task and its cancellation is taken back here.
        """
        event = self._next_now()
        if event is None:
            task = self._waiting = self._reader
            assert task is not None, "not entered"
            self._waiting_since_s = self._loop.time()
            if not self._is_timed:
                self._is_timed = True
                self._timer.add(self, self._check_at_s(self._waiting_since_s))
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
            case Tokens(ids=ids, finish_reason=reason):
                self._note_output()
                self.tokens += len(ids)
                self.finish_reason = reason
            case WaitStage(stage=stage):
                self.stage = stage
                self._note_progress(event)
            case Assigned():
                self.assigned = event
                self._assigned_s = self._loop.time()
                self.stage = "first output"
            case ForwardedHead():  # nothing of it is sent before the first chunk
                self._head_came = True
                self._progress_s = self._loop.time()
            case ForwardedChunk(prompt_tokens=prompt, completion_tokens=completion):
                self._note_output()
                self.prompt_tokens, self.tokens = prompt, completion
            case RequestUsage():
                self.usage = event
            case HandlerChunk(usage=usage):
                self._note_output()
                self.usage = usage
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
    def started_s(self) -> float:
        """Its begin, by the loop's clock, which is monotonic and may be some milliseconds late."""
        return self._started_s

    @property
    def ended_s(self) -> float:
        """Its end, by the same clock; its begin if it has not ended."""
        return self._started_s if self._ended_s is None else self._ended_s

    @property
    def assigned_after_s(self) -> float | None:
        """From the call's begin to its last assignment, None if there was none."""
        return None if self._assigned_s is None else self._assigned_s - self._started_s

    @property
    def took_s(self) -> float:
        """From the call's begin to its end, or until now."""
        return (self._ended_s or self._loop.time()) - self._started_s

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

    def check_deadline(self, now_s: float) -> float:
        """Cancel the wait if its deadline has passed; return when to check again, infinity for never."""
        if self._waiting is not None and now_s < self._deadline_s():
            return self._check_at_s(now_s)
        self._is_timed = False  # the next wait adds it again
        if self._waiting is not None:
            self._expired, self._cancelling = True, self._waiting.cancelling()
            self._waiting.cancel()
        return math.inf

    def _check_at_s(self, now_s: float) -> float:
        # No later than the deadline of a wait that begins now may be, once there is an output.
        return min(self._deadline_s(), now_s + self.call.deadlines.idle_s)

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
        last_s = self._started_s + limits.total_s
        if self.assigned is not None and isinstance(self.call.work, ForwardRequest) and not self._head_came:
            return last_s  # the head of a whole response comes after all of its tokens
        next_s = self._waiting_since_s + limits.idle_s if self.outputs else self._progress_s + limits.start_s
        return min(next_s, last_s)

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
