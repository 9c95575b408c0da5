"""A stage whose steps are metered: each call pays for its tokens in the instance that ran them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from invoker.engine.contract import EngineCall, EngineError, StepMeter
from invoker.engine.kv_slices import KvSlice, in_host_memory
from invoker.engine.runner import NOBODY
from invoker.engine.stage_contract import Stage, StageInput, StageOutput
from invoker.stages.kv_choice import PrefillRate

Aside = Callable[[str, KvSlice], None]  # takes what a sequence leaves; by any thread
Join = Callable[[str], EngineCall]  # the call of that id, held; on the loop's thread
T = TypeVar("T")

log = logging.getLogger("invoker.stages")


class StepCalls:
    """The calls for which a thread runs sequences: each is held from when its sequence is entered until it is
    released. Made on the loop's thread, where calls live."""

    def __init__(self, meter: StepMeter, join: Join) -> None:
        self._meter = meter
        self._join = join
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, Future[EngineCall]] = {}

    def enter(self, sequence: str, call_id: str) -> None:
        """Ask for the call; the answer is there by when a step has been run."""
        if sequence not in self._held:
            asked = self._held[sequence] = Future()
            if not self._post(partial(self._join_for, asked, call_id)):
                asked.set_result(NOBODY)

    def release(self, sequence: str) -> None:
        asked = self._held.pop(sequence, None)
        if asked is not None:
            self._post(lambda: asked.result().release())

    def release_all(self) -> None:
        for sequence in tuple(self._held):
            self.release(sequence)

    def metered(self, work: Callable[[], T], ran: Iterable[tuple[str, int]]) -> T:
        """Do it; the sequences share its time by their tokens."""
        self._meter.began()
        try:
            return work()
        finally:
            self._meter.ended(
                [
                    (self._held[sequence].result(), tokens)
                    for sequence, tokens in ran
                    if sequence in self._held
                ]
            )

    def _join_for(self, asked: "Future[EngineCall]", call_id: str) -> None:
        try:
            asked.set_result(self._join(call_id))
        except Exception:
            log.exception("what is run for call %s is metered to nobody", call_id)
            asked.set_result(NOBODY)

    def _post(self, callback: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # a loop that is closed has nobody left to bill
            return False
        return True


class MeteredStage:
    """Used by one thread, `stage`'s. A call is held from the step that opens its sequence until the one that
    closes it: so long the stage may run something for it. `rate` comes to know how fast it is."""

    def __init__(
        self,
        stage: Stage,
        meter: StepMeter,
        join: Join,
        *,
        aside: Aside | None = None,
        rate: PrefillRate | None = None,
    ) -> None:
        self.stage = stage
        self._calls = StepCalls(meter, join)
        self._aside = aside
        self._drawn: set[str] = set()  # sequences whose prompts have run
        self._given: set[str] = set()  # those of them put aside before the step that closes them
        self._rate = rate or PrefillRate()

    def __repr__(self) -> str:
        return f"<MeteredStage {self.stage!r}>"

    def run(self, given: StageInput) -> StageOutput:
        """See Stage."""
        step = given.step
        for name in step.kept:
            if name not in self._given:
                self._put_aside(name)
        for name in step.closed:
            self._drawn.discard(name)
            self._given.discard(name)
            self._calls.release(name)
        for opening in step.opened:
            self._calls.enter(opening.sequence, opening.call)
        if not step.chunks:
            return self.stage.run(given)
        self._drawn.update([chunk.sequence for chunk in step.wanting])
        ran = [(chunk.sequence, chunk.count) for chunk in step.chunks]
        return self._calls.metered(lambda: self._timed(given), ran)

    def finish(self, given: StageInput) -> StageOutput:
        """See Stage."""
        if not given.step.wanting:
            return self.stage.finish(given)
        ran = [(chunk.sequence, chunk.count) for chunk in given.step.wanting]
        return self._calls.metered(lambda: self.stage.finish(given), ran)

    def give(self, sequence: str) -> None:
        """Put aside what there is of a sequence that somebody goes on with, once; nothing before all of its
        prompt has run here: then the step that closes it does, behind which there is more of it."""
        if sequence in self._drawn and sequence not in self._given and self._put_aside(sequence):
            self._given.add(sequence)

    def close(self) -> None:
        self.stage.close()
        self._calls.release_all()

    def _timed(self, given: StageInput) -> StageOutput:
        began_s = time.perf_counter()
        output = self.stage.run(given)
        seconds = time.perf_counter() - began_s if output.device_s is None else output.device_s
        first, last = self.stage.layers
        self._rate.ran(given.step.tokens, last - first, seconds)
        return output

    def _put_aside(self, sequence: str) -> bool:
        if self._aside is None:
            return False
        try:
            one = in_host_memory(self.stage.export_kv(sequence))
        except (EngineError, RuntimeError, MemoryError) as error:  # it goes on without
            log.info("K and V of sequence %s are not kept: %s", sequence, error)
            return False
        self._aside(sequence, one)
        return True
