"""Emulated stages: tokens of whole engines, each stage's own time, and nothing out of order."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from benchmarks.engine.local_pipeline import LocalPipeline
from benchmarks.scaleout.profiles import find_profile
from invoker.emulated.device_clock import Lateness
from invoker.emulated.engine import EmulatedEngine
from invoker.emulated.kv import kv_shape
from invoker.emulated.profiles import StepLoad
from invoker.emulated.stage import ROWS, EmulatedStage
from invoker.emulated.tokens import continuation
from invoker.engine.contract import NewSequence, OutOfKvCache
from invoker.engine.runner import UNBILLED, NullMeter
from invoker.engine.scheduling.pipeline_scheduler import PipelineScheduler, PipelineShape
from invoker.engine.scheduling.scheduler import StepLimits
from invoker.engine.stage_contract import (
    OpenSequence,
    OutOfStep,
    StageChunk,
    StageInput,
    StageStep,
    rows_as_bytes,
)
from invoker.kv.choice import PrefillRate
from invoker.pipeline.metered import MeteredStage
from registry.messages.sampling import Sampling
from tests.fixtures.emulated import SleepTime

PROFILE = find_profile("h800-llama2-7b/1000")
VOCABULARY = PROFILE.model.vocabulary
GREEDY = Sampling(max_tokens=12, temperature=0.0)
LIMITS = StepLimits(sequences=8, prefill_tokens=512, shared_prefill_tokens=232)


def stages_of(cuts: list[int], times: list[SleepTime] | None = None) -> list[EmulatedStage]:
    """Return stages from cut to cut, each on a device of its own."""
    times = times or [SleepTime() for _ in cuts[1:]]
    return [
        EmulatedStage(PROFILE, time.clock(), 200 * kv_shape(PROFILE, last - first).page_bytes, first, last)
        for (first, last), time in zip(pairwise(cuts), times, strict=True)
    ]


def pipeline_of(stages: list[EmulatedStage]) -> LocalPipeline:
    shape = PipelineShape(
        stages=len(stages), pages=200, context=4096, vocabulary=VOCABULARY, steps=len(stages) + 1
    )
    return LocalPipeline(stages, PipelineScheduler(shape, LIMITS))


def ask(name: str, prompt: list[int], sampling: Sampling = GREEDY) -> NewSequence:
    return NewSequence(request_id=name, prompt_ids=prompt, generated_ids=[], sampling=sampling)


def opening_step(count: int = 4) -> StageStep:
    opening = OpenSequence(sequence="s", max_tokens=100, sampling=GREEDY)
    chunk = StageChunk(sequence="s", start=0, count=count, last=True)
    return StageStep(number=0, closed=(), opened=(opening,), chunks=(chunk,))


@pytest.mark.parametrize("cuts", [[0, 32], [0, 16, 32], [0, 5, 6, 20, 32]])
def test_pipelines_yield_the_tokens_of_whole_engines(cuts: list[int]) -> None:
    drawn = Sampling(max_tokens=12, temperature=0.7, seed=9)
    asked = [ask(str(at), list(range(20, 40 + 97 * at)), drawn if at % 2 else GREEDY) for at in range(6)]
    pipeline = pipeline_of(stages_of(cuts))
    for sequence in asked:
        pipeline.add(sequence)
    tokens: dict[str, list[int]] = {}
    while pipeline.has_work:
        for output in pipeline.step():
            assert not output.error, output.error
            if output.token_id is not None:
                tokens.setdefault(output.request_id, []).append(output.token_id)
    for one in asked:
        assert tokens[one.request_id] == continuation(one.prompt_ids, 12, VOCABULARY, one.sampling)


def test_each_stage_takes_its_layers_time() -> None:
    times = [SleepTime(), SleepTime()]
    pipeline = pipeline_of(stages_of([0, 10, 32], times))
    pipeline.add(ask("a", [20] * 300, Sampling(max_tokens=1, temperature=0.0)))
    while pipeline.has_work:
        pipeline.step()
    batch = StepLoad(tokens=300, sequences=1)
    assert times[0].slept == pytest.approx([PROFILE.stage_s(0, 10, batch)])
    assert times[1].slept == pytest.approx([PROFILE.stage_s(10, 32, batch)])


async def test_how_fast_it_is_shows_where_its_work_was_queued_before_it_was_asked() -> None:
    """A step that comes late begins in its past, and is over at once by the clock of who waits for it."""
    rate, reported = PrefillRate(), SleepTime()
    (stage,) = stages_of([0, 32], [reported])
    metered = MeteredStage(stage, NullMeter(), lambda _: UNBILLED, rate=rate)
    first = opening_step()
    held = await asyncio.to_thread(metered.run, StageInput(step=first, data=torch.tensor([20, 21, 22, 23])))
    reported.now_s += Lateness().hop_s
    chunk = StageChunk(sequence="s", start=4, count=1, last=True)
    later = StageStep(number=1, closed=(), opened=(), chunks=(chunk,))
    await asyncio.to_thread(metered.run, StageInput(step=later, data=torch.tensor([24])))
    assert held.device_s is not None
    assert held.device_s == pytest.approx(PROFILE.step_s(StepLoad(tokens=4, sequences=1)))
    assert rate.tokens_per_s(32) == pytest.approx(4 / held.device_s)


def test_hidden_states_have_the_size_of_the_models() -> None:
    (stage, _) = stages_of([0, 16, 32])
    output = stage.run(StageInput(step=opening_step(), data=torch.tensor([20, 21, 22, 23])))
    assert output.hidden is not None and output.hidden.dtype is ROWS
    assert len(rows_as_bytes(output.hidden)) == 4 * 12  # 8,192 bytes a token, 1/1000 of that in whole items
    assert PROFILE.hidden_bytes(1) == 9 and stage.facts.row_bytes == 12


def test_rows_that_skipped_a_stage_are_refused() -> None:
    first, _, last = stages_of([0, 10, 20, 32])
    output = first.run(StageInput(step=opening_step(), data=torch.tensor([20, 21, 22, 23])))
    assert output.hidden is not None
    with pytest.raises(OutOfStep, match="have not passed 20 layers"):
        last.run(StageInput(step=output.step, data=output.hidden))


def test_what_does_not_follow_is_refused() -> None:
    (stage,) = stages_of([0, 32])
    stage.run(StageInput(step=opening_step(), data=torch.tensor([20, 21, 22, 23])))
    again = StageStep(number=1, closed=(), opened=(), chunks=opening_step().chunks)
    with pytest.raises(OutOfStep, match="does not follow"):
        stage.run(StageInput(step=again, data=torch.tensor([20, 21, 22, 23])))
    with pytest.raises(OutOfStep, match="open already"):
        stage.run(StageInput(step=opening_step(), data=torch.tensor([20, 21, 22, 23])))
    with pytest.raises(OutOfStep, match="3 rows"):
        stage.run(StageInput(step=again, data=torch.tensor([20, 21, 22])))
    with pytest.raises(OutOfStep, match="samples no tokens"):
        stage.finish(StageInput(step=again, data=torch.tensor([20])))
    with pytest.raises(OutOfKvCache, match="less than one page"):
        EmulatedStage(PROFILE, SleepTime().clock(), 10, 0, 4)
    with pytest.raises(ValueError, match="no layers"):
        EmulatedStage(PROFILE, SleepTime().clock(), 10, 4, 33)


def test_no_more_than_fits() -> None:
    page_bytes = kv_shape(PROFILE, 32).page_bytes
    stage = EmulatedStage(PROFILE, SleepTime().clock(), page_bytes, 0, 32)
    with pytest.raises(OutOfStep, match="needs 2 pages"):
        stage.run(StageInput(step=opening_step(17), data=torch.arange(20, 37)))


def test_a_sequence_moves_to_a_whole_engine_with_its_keys_and_values() -> None:
    pipeline = pipeline_of(stages_of([0, 12, 32]))
    asked = ask("a", list(range(20, 420)))
    pipeline.add(asked)
    seen: list[int] = []
    while len(seen) < 5:
        seen += [output.token_id for output in pipeline.step() if output.token_id is not None]
    name = pipeline.scheduler.stage_name("a")
    kv = [stage.export_kv(name) for stage in pipeline.stages]
    left = replace(asked, generated_ids=tuple(seen))
    time = SleepTime()
    engine = EmulatedEngine(
        PROFILE, time.clock(), 100 * kv_shape(PROFILE, 32).page_bytes, context_length=4096
    )
    engine.add(left, kv)
    rest = []
    while engine.has_work:
        rest += [output.token_id for output in engine.step()]
    expected = continuation(range(20, 420), 12, VOCABULARY, GREEDY)
    assert seen + rest == expected
    assert max(time.slept) < PROFILE.step_s(StepLoad(tokens=4, sequences=1, context=420))
    with pytest.raises(OutOfStep, match="has no K and V"):
        pipeline.stages[0].export_kv(name, (3, 20))
    pipeline.close()
