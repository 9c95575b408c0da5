"""One call under its deadlines, with a running account of what it used."""

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self, TypeVar

from gateway.contract import (
    WAITS_FOR_NODE,
    Assigned,
    Call,
    CallUse,
    Dispatcher,
    DispatchError,
    Event,
    OpenCall,
    Stage,
)
from registry.eager import Begun, begin
from registry.messages import Tokens, Usage
from registry.time_limit import TimeLimit

T = TypeVar("T")

_STILL = frozenset({"queue", WAITS_FOR_NODE})  # stages in which nothing is under way


class CallRun:
    """Opens a call and iterates over its events.

    Three limits, each for itself: until the first output, between two outputs, and the whole call.
    The first begins anew whenever the start that the call waits for gets further than any before.
    Time that the reader takes between two events does not count as idle. The reader tells what it has
    passed on (`note_passed`).
    """

    def __init__(self, dispatcher: Dispatcher, call: Call) -> None:
        self.call = call
        self.stage = "queue"
        self.assigned: Assigned | None = None
        self.usage: Usage | None = None
        self.tokens = 0
        self.passed_on = 0  # tokens that the reader has passed on
        self.outputs = 0
        self.first_output_s: float | None = None
        self._assigned_s: float | None = None
        self._ended_s: float | None = None
        self._opened: AbstractAsyncContextManager[OpenCall] | None = None
        self._events: OpenCall | None = None
        self._dispatcher = dispatcher
        self._started_s = asyncio.get_running_loop().time()
        self._progress_s = self._started_s
        self._reached: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<CallRun {self.call.request_id} stage={self.stage} tokens={self.tokens}>"

    async def __aenter__(self) -> Self:
        opened = self._dispatcher.run(self.call)
        begun = begin(opened.__aenter__())
        self._events = await self._in_time(begun) if isinstance(begun, Begun) else begun
        self._opened = opened
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_s = asyncio.get_running_loop().time()
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        assert self._events is not None
        begun = begin(self._events.__anext__())
        event = await self._in_time(begun) if isinstance(begun, Begun) else begun
        match event:
            case Stage(stage=stage):
                self.stage = stage
                self._note_progress(event)
            case Assigned():
                self.assigned = event
                self._assigned_s = asyncio.get_running_loop().time()
                self.stage = "first output"
            case Tokens(ids=ids):
                self._output()
                self.tokens += len(ids)
            case Usage():
                self.usage = event
            case _:
                self._output()
        return event

    def note_passed(self, tokens: int) -> None:
        """So many more tokens went to the client's connection, or into the answer that is to go there."""
        self.passed_on += tokens

    @property
    def used(self) -> tuple[CallUse, ...]:
        """What it used, an entry for each instance; final once it has been left."""
        return () if self._events is None else self._events.used

    @property
    def assigned_ago_s(self) -> float:
        """From its assignment until now."""
        return 0.0 if self._assigned_s is None else asyncio.get_running_loop().time() - self._assigned_s

    @property
    def first_output_after_s(self) -> float | None:
        """From the call's begin to its first output, None if there was none."""
        return None if self.first_output_s is None else self.first_output_s - self._started_s

    @property
    def token_gap_s(self) -> float | None:
        """Mean time between tokens, None for fewer than two."""
        if self.tokens < 2 or self.first_output_s is None:
            return None
        ended_s = self._ended_s or asyncio.get_running_loop().time()
        return (ended_s - self.first_output_s) / (self.tokens - 1)

    @property
    def exec_ms(self) -> float:
        """The node's own figure, or from the assignment to the end."""
        if self.usage is not None:
            return self.usage.exec_us / 1000
        if self._assigned_s is None:
            return 0.0
        ended_s = self._ended_s or asyncio.get_running_loop().time()
        return (ended_s - self._assigned_s) * 1000

    async def _in_time(self, begun: Begun[T]) -> T:
        """Wait for the rest of it. Raises DispatchError if its time runs out."""
        try:
            with TimeLimit(self._left_s()):
                return await begun
        except TimeoutError:
            raise self._timed_out() from None

    def _note_progress(self, event: Stage) -> None:
        # A start that fails and begins again passes the same stages: that is no progress, so that a
        # call is not held for ever by starts that never get further.
        if event.stage in _STILL or event.fraction <= self._reached.get(event.stage, -1.0):
            return
        self._reached[event.stage] = event.fraction
        self._progress_s = asyncio.get_running_loop().time()

    def _output(self) -> None:
        self.outputs += 1
        if self.first_output_s is None:
            self.first_output_s = asyncio.get_running_loop().time()

    def _left_s(self) -> float:
        limits = self.call.deadlines
        now = asyncio.get_running_loop().time()
        next_s = limits.idle_s if self.outputs else self._progress_s + limits.start_s - now
        return min(next_s, self._started_s + limits.total_s - now)

    def _timed_out(self) -> DispatchError:
        if self.stage == WAITS_FOR_NODE and not self.outputs:
            return DispatchError(
                "no_nodes", "no node is there to serve the call", status=503, retry_after_s=5
            )
        limits = self.call.deadlines
        passed = asyncio.get_running_loop().time() - self._started_s
        if passed >= limits.total_s:
            limit = f"the whole request may take {limits.total_s:g} s"
        elif self.outputs:
            limit = f"the next output may take {limits.idle_s:g} s"
        else:
            limit = f"the first output, or progress towards it, may take {limits.start_s:g} s"
        stage = "output" if self.outputs else self.stage
        return DispatchError("timeout", f"time ran out in stage {stage!r}: {limit}", status=504)
