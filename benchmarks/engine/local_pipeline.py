"""A pipeline with all of its stages in this process, for benchmarks and tests."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from invoker.engine.contract import EngineError, NewSequence, TokenOutput
from invoker.engine.scheduling.pipeline_scheduler import PipelineScheduler
from invoker.engine.stage_contract import Stage, StageInput, StageOutput


class LocalPipeline:
    """A GenerateEngine over a chain of stages in one thread.

    In each `step` every stage runs one step of the pipeline, if one has reached it, so that several are in
    flight as in a distributed pipeline.
    """

    def __init__(self, stages: Sequence[Stage], scheduler: PipelineScheduler) -> None:
        for one, following in pairwise(stages):
            assert one.layers[1] == following.layers[0], f"{one!r} and {following!r} do not meet"
        assert [stage.has_head for stage in stages].count(True) == 1, "the head is not at one place"
        self.stages = tuple(stages)
        self.scheduler = scheduler
        self._waiting: tuple[deque[StageInput], ...] = tuple(deque() for _ in stages)
        self._returning: deque[StageInput] = deque()  # to the first stage, for a tied head
        self._outputs: list[TokenOutput] = []

    def __repr__(self) -> str:
        return f"<LocalPipeline of {len(self.stages)} stages, {self.scheduler!r}>"

    @property
    def max_sequence_tokens(self) -> int:
        return self.scheduler.max_sequence_tokens

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def sequences(self) -> int:
        return self.scheduler.sequences

    def add(self, sequence: NewSequence) -> None:
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def step(self) -> list[TokenOutput]:
        """Run the next step of each stage; return the outputs of the head."""
        self._outputs = []
        while (given := self.scheduler.next_step()) is not None:
            self._waiting[0].append(given)
        if self._returning:
            self._run_on(0, self._returning.popleft(), finishes=True)
        for index in reversed(range(len(self.stages))):
            if self._waiting[index]:
                self._run_on(index, self._waiting[index].popleft())
        return self._outputs

    def close(self) -> None:
        for stage in self.stages:
            stage.close()

    def _run_on(self, index: int, given: StageInput, *, finishes: bool = False) -> None:
        stage = self.stages[index]
        try:
            output = stage.finish(given) if finishes else stage.run(given)
        except EngineError as error:
            self._outputs += self.scheduler.fail_step(given.step.number, str(error))
            return
        self._pass_on(index, output)

    def _pass_on(self, index: int, output: StageOutput) -> None:
        if output.hidden is None:
            self._outputs += self.scheduler.complete_step(output)
            return
        following = StageInput(step=output.step, data=output.hidden)
        if index + 1 < len(self.stages):
            self._waiting[index + 1].append(following)
        else:
            self._returning.append(following)
