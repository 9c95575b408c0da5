"""Meters a stage's steps: each call is charged for its tokens, in the instance that ran them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from invoker.engine.contract import EngineCall, EngineError, StepMeter
from invoker.engine.kv.export import ExportKv, KvExport
from invoker.engine.kv.slices import in_host_memory
from invoker.engine.runner import UNBILLED
from invoker.engine.stage_contract import Stage, StageInput, StageOutput
from invoker.kv.choice import PrefillRate
from invoker.traces.stages import StageSpans
from registry.messages.trace import TraceContext

JoinCall = Callable[[str], EngineCall]  # holds the call of that id; called on the loop's thread
T = TypeVar("T")

log = logging.getLogger("invoker.stages")


class StepCalls:
    """The calls that a thread runs sequences for, each held from `enter` to `release`.

    Constructed on the loop's thread, which owns the calls. `spans` are those of the sequences.
    """

    def __init__(self, meter: StepMeter, join: JoinCall, spans: StageSpans | None = None) -> None:
        self._meter = meter
        self._spans = spans
        self._join = join
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, Future[EngineCall]] = {}

    def enter(self, sequence: str, call_id: str, trace: TraceContext | None = None) -> None:
        """Request the call from the loop; it has arrived by the end of the sequence's first step."""
        if sequence not in self._held:
            if trace is not None and self._spans is not None:
                self._spans.enter(sequence, call_id, trace)
            pending = self._held[sequence] = Future()
            if not self._post(partial(self._join_for, pending, call_id)):
                pending.set_result(UNBILLED)

    def release(self, sequence: str) -> None:
        if self._spans is not None:
            self._spans.release(sequence)
        pending = self._held.pop(sequence, None)
        if pending is not None:
            self._post(lambda: pending.result().release())

    def release_all(self) -> None:
        for sequence in tuple(self._held):
            self.release(sequence)

    def metered(self, work: Callable[[], T], ran: Sequence[tuple[str, int]]) -> T:
        """Run `work`, and divide its duration among the sequences by their tokens."""
        self._meter.start_step()
        try:
            return work() if self._spans is None or not self._spans.open else self._traced(work, ran)
        finally:
            self._meter.end_step(
                [
                    (self._held[sequence].result(), tokens)
                    for sequence, tokens in ran
                    if sequence in self._held
                ]
            )

    def _traced(self, work: Callable[[], T], ran: Sequence[tuple[str, int]]) -> T:
        """Run `work`, and add its duration to the spans of the sequences."""
        assert self._spans is not None
        started_s = time.perf_counter()
        try:
            return work()
        finally:
            seconds = time.perf_counter() - started_s
            for sequence, _ in ran:
                self._spans.add_step(sequence, seconds)

    def _join_for(self, pending: "Future[EngineCall]", call_id: str) -> None:
        try:
            pending.set_result(self._join(call_id))
        except Exception:  # a bug: the call is served unbilled, the stage serves on
            log.exception("call %s: its steps cannot be charged", call_id)
            pending.set_result(UNBILLED)

    def _post(self, callback: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed
            return False
        return True


class MeteredStage:
    """A stage that meters its steps and exports K and V; used by one thread.

    A call is held from the step that opens its sequence until the one that closes it. `rate` records the
    throughput.
    """

    def __init__(
        self,
        stage: Stage,
        meter: StepMeter,
        join: JoinCall,
        *,
        export: ExportKv | None = None,
        rate: PrefillRate | None = None,
        spans: StageSpans | None = None,
    ) -> None:
        self.stage = stage
        self._calls = StepCalls(meter, join, spans)
        self._export = export
        self._prefilled: set[str] = set()  # sequences whose prompts have run
        self._exported: set[str] = set()  # of them, those exported before the step that closes them
        self._rate = rate or PrefillRate()

    def __repr__(self) -> str:
        return f"<MeteredStage {self.stage!r}>"

    def run(self, inputs: StageInput) -> StageOutput:
        """Run a step (see Stage.run)."""
        step = inputs.step
        for name in step.exported:
            if name not in self._exported:
                self._try_export(name)
        for name in step.closed:
            self._prefilled.discard(name)
            self._exported.discard(name)
            self._calls.release(name)
        for opening in step.opened:
            self._calls.enter(opening.sequence, opening.call, opening.trace)
        if not step.chunks:
            return self.stage.run(inputs)
        self._prefilled.update([chunk.sequence for chunk in step.sampled_chunks])
        ran = [(chunk.sequence, chunk.count) for chunk in step.chunks]
        return self._calls.metered(lambda: self._timed(inputs), ran)

    def finish(self, inputs: StageInput) -> StageOutput:
        """See Stage."""
        if not inputs.step.sampled_chunks:
            return self.stage.finish(inputs)
        ran = [(chunk.sequence, chunk.count) for chunk in inputs.step.sampled_chunks]
        return self._calls.metered(lambda: self.stage.finish(inputs), ran)

    def export(self, sequence: str) -> None:
        """Export a sequence's K and V, once, if all of its prompt has run here.

        Else the step that closes the sequence exports them, when there is more of it.
        """
        if sequence in self._prefilled and sequence not in self._exported and self._try_export(sequence):
            self._exported.add(sequence)

    def close(self) -> None:
        self.stage.close()
        self._calls.release_all()

    def _timed(self, inputs: StageInput) -> StageOutput:
        started_s = time.perf_counter()
        output = self.stage.run(inputs)
        seconds = time.perf_counter() - started_s if output.device_s is None else output.device_s
        first, last = self.stage.layers
        self._rate.record(inputs.step.tokens, last - first, seconds)
        return output

    def _try_export(self, sequence: str) -> bool:
        if self._export is None:
            return False
        try:
            kv = KvExport.whole(in_host_memory(self.stage.export_kv(sequence)))
        except (EngineError, RuntimeError, MemoryError) as error:  # then it is recomputed
            log.info("cannot export K and V of sequence %s: %s", sequence, error)
            return False
        self._export(sequence, kv)
        return True
