"""A stage whose steps are metered: each call pays for its tokens in the instance that ran them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from invoker.engine.contract import EngineCall, StepMeter
from invoker.engine.runner import NOBODY
from invoker.engine.stage_contract import Opening, Stage, StageChunk, StageInput, StageOutput

Join = Callable[[str], EngineCall]  # the call of that id, held; on the loop's thread


class MeteredStage:
    """Used by one thread, `stage`'s. A call is held from the step that opens its sequence until the one that
    closes it: so long the stage may run something for it. Made on the loop's thread, where calls live."""

    def __init__(self, stage: Stage, meter: StepMeter, join: Join) -> None:
        self.stage = stage
        self._meter = meter
        self._join = join
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, Future[EngineCall]] = {}

    def __repr__(self) -> str:
        return f"<MeteredStage {self.stage!r}>"

    def run(self, given: StageInput) -> StageOutput:
        """See Stage."""
        step = given.step
        for name in step.closed:
            self._release(name)
        self._enter(step.opened)
        return self._metered(self.stage.run, given, step.chunks)

    def finish(self, given: StageInput) -> StageOutput:
        """See Stage."""
        return self._metered(self.stage.finish, given, given.step.wanting)

    def close(self) -> None:
        self.stage.close()
        for name in tuple(self._held):
            self._release(name)

    def _metered(
        self, work: Callable[[StageInput], StageOutput], given: StageInput, chunks: Sequence[StageChunk]
    ) -> StageOutput:
        if not chunks:
            return work(given)
        self._meter.began()
        try:
            return work(given)
        finally:
            self._meter.ended(
                [
                    (self._held[chunk.sequence].result(), chunk.count)
                    for chunk in chunks
                    if chunk.sequence in self._held
                ]
            )

    def _enter(self, opened: Sequence[Opening]) -> None:
        """Ask for the calls; the answer is there by when the step has been run."""
        for opening in opened:
            if opening.sequence not in self._held:
                asked = self._held[opening.sequence] = Future()
                if not self._post(partial(self._join_for, asked, opening.call)):
                    asked.set_result(NOBODY)

    def _join_for(self, asked: "Future[EngineCall]", call_id: str) -> None:
        try:
            asked.set_result(self._join(call_id))
        except Exception as error:
            asked.set_exception(error)

    def _release(self, sequence: str) -> None:
        asked = self._held.pop(sequence, None)
        if asked is not None:
            self._post(lambda: asked.result().release())

    def _post(self, callback: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # a loop that is closed has nobody left to bill
            return False
        return True
