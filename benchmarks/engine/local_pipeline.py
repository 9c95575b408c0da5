"""A pipeline whose stages are all in this process: what tests and measurements run."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from invoker.engine.conductor import Conductor
from invoker.engine.contract import EngineError, NewSequence, TokenOutput
from invoker.engine.stage_contract import Stage, StageInput, StageOutput


class LocalPipeline:
    """A GenerateEngine over a chain of stages, which takes turns like a real one: in each `step` of it every
    stage runs one step of the pipeline, if one has come to it, so that several are under way."""

    def __init__(self, stages: Sequence[Stage], conductor: Conductor) -> None:
        for one, following in pairwise(stages):
            assert one.layers[1] == following.layers[0], f"{one!r} and {following!r} do not meet"
        assert [stage.has_head for stage in stages].count(True) == 1, "the head is not at one place"
        self.stages = tuple(stages)
        self.conductor = conductor
        self._waiting: tuple[deque[StageInput], ...] = tuple(deque() for _ in stages)
        self._returning: deque[StageInput] = deque()  # to the first stage, for a tied head
        self._outputs: list[TokenOutput] = []

    def __repr__(self) -> str:
        return f"<LocalPipeline of {len(self.stages)} stages, {self.conductor!r}>"

    @property
    def max_sequence_tokens(self) -> int:
        return self.conductor.max_sequence_tokens

    @property
    def has_work(self) -> bool:
        return self.conductor.has_work

    @property
    def sequences(self) -> int:
        return self.conductor.sequences

    def add(self, sequence: NewSequence) -> None:
        self.conductor.add(sequence)

    def cancel(self, request_id: str) -> None:
        self.conductor.cancel(request_id)

    def step(self) -> list[TokenOutput]:
        """Let each stage run what has come to it; what came out at the head."""
        self._outputs = []
        while (given := self.conductor.next_step()) is not None:
            self._waiting[0].append(given)
        if self._returning:
            self._run_on(0, self._returning.popleft(), finishes=True)
        for index in reversed(range(len(self.stages))):
            if self._waiting[index]:
                self._run_on(index, self._waiting[index].popleft())
        return self._outputs

    def close(self) -> None:
        self.conductor.leave()
        for stage in self.stages:
            stage.close()

    def _run_on(self, index: int, given: StageInput, *, finishes: bool = False) -> None:
        stage = self.stages[index]
        try:
            output = stage.finish(given) if finishes else stage.run(given)
        except EngineError as error:
            self._outputs += self.conductor.fail(given.step.number, str(error))
            return
        self._pass_on(index, output)

    def _pass_on(self, index: int, output: StageOutput) -> None:
        if output.hidden is None:
            self._outputs += self.conductor.take(output)
            return
        following = StageInput(step=output.step, data=output.hidden)
        if index + 1 < len(self.stages):
            self._waiting[index + 1].append(following)
        else:
            self._returning.append(following)
