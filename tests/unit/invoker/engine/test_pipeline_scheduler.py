"""Steps of a pipeline over fake stages: no token is lost, repeated or changed, whatever is in flight."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.engine.local_pipeline import LocalPipeline
from invoker.engine.contract import OutOfKvCache, TokenOutput
from invoker.engine.kv.cache import PAGE_TOKENS
from invoker.engine.scheduling.pipeline_scheduler import PipelineScheduler, PipelineShape
from invoker.engine.scheduling.scheduler import StepLimits
from invoker.engine.scheduling.sequence_table import InvalidSequence
from invoker.engine.stage_contract import StageInput, StageOutput
from tests.fixtures.engine import sequence
from tests.fixtures.fake_engine import continuation
from tests.fixtures.fake_stage import FakeStage
from tests.fixtures.stage import pipeline_of

VOCABULARY = 500


def _stages(cuts: Sequence[int], *, tied: bool = False, pages: int = 64) -> list[FakeStage]:
    return [
        FakeStage(a, b, cuts[-1], tied=tied, pages=pages, vocabulary=VOCABULARY) for a, b in pairwise(cuts)
    ]


def _scheduler(
    stages: int = 2, pages: int = 64, steps: int = 3, limits: StepLimits | None = None
) -> PipelineScheduler:
    shape = PipelineShape(stages=stages, pages=pages, context=512, vocabulary=VOCABULARY, steps=steps)
    return PipelineScheduler(
        shape, limits or StepLimits(sequences=8, prefill_tokens=24, shared_prefill_tokens=16)
    )


def _prompt(index: int, length: int) -> list[int]:
    return [(index * 31 + k) % VOCABULARY for k in range(length)]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, str]]]:
    """Pages, and sequences as (prompt, tokens to generate, tenant) that fit them one by one."""
    pages = draw(st.integers(2, 12))
    most = pages * PAGE_TOKENS
    prompts = st.integers(1, min(100, most - 1))
    sizes = draw(st.lists(st.tuples(prompts, st.integers(1, 30), st.sampled_from("ab")), max_size=8))
    return pages, [(prompt, min(length, most - prompt), tenant) for prompt, length, tenant in sizes]


@settings(max_examples=40)
@given(
    workload=workloads(),
    tied=st.booleans(),
    stages=st.integers(1, 4),
    steps=st.integers(1, 6),
    cancels=st.dictionaries(st.integers(0, 7), st.integers(1, 60), max_size=3),
)
def test_each_sequence_gets_its_tokens(
    workload: tuple[int, list[tuple[int, int, str]]],
    tied: bool,
    stages: int,
    steps: int,
    cancels: dict[int, int],
) -> None:
    pages, sizes = workload
    fakes = _stages(range(stages + 1), tied=tied, pages=pages)
    limits = StepLimits(sequences=4, prefill_tokens=20, shared_prefill_tokens=8)
    pipeline = LocalPipeline(fakes, _scheduler(stages, pages, steps, limits))
    for i, (prompt, length, tenant) in enumerate(sizes):
        one = sequence(str(i), _prompt(i, prompt), max_tokens=length, ignore_eos=True)
        pipeline.add(replace(one, tenant=tenant))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(sizes))}
    turns = 0
    while pipeline.has_work:
        turns += 1
        assert turns < 5000, f"{pipeline!r} makes no progress"
        for index, turn in cancels.items():
            if turn == turns:
                pipeline.cancel(str(index))
        for output in pipeline.step():
            assert not output.error, output.error
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
        pipeline.scheduler.check_integrity()
    for i, (prompt, length, _) in enumerate(sizes):
        expected = continuation(_prompt(i, prompt), length, VOCABULARY)
        found = tokens[str(i)]
        assert found == expected[: len(found)]
        assert len(found) == length or i in cancels
    assert [fake.sequences for fake in fakes] == [0] * stages


def test_sequences_are_spread_over_micro_batches() -> None:
    scheduler = _scheduler(stages=3, steps=4)
    stage = _stages([0, 1])[0]
    for i in range(8):
        scheduler.add(sequence(str(i), _prompt(i, 1), max_tokens=9, ignore_eos=True))

    def steps() -> list[StageInput]:
        found = []
        while (given := scheduler.next_step()) is not None:
            found.append(given)
        return found

    (first,) = steps()
    assert first.step.tokens == 8
    scheduler.complete_step(stage.run(first))
    sizes = []
    for _ in range(4):
        under_way = steps()
        sizes.append([len(one.step.chunks) for one in under_way])
        assert scheduler.steps_in_flight == len(under_way)
        for one in under_way:
            scheduler.complete_step(stage.run(one))
    assert sizes == [[3, 3, 2]] * 4


def test_one_step_at_a_time_takes_all() -> None:
    scheduler = _scheduler(stages=3, steps=1)
    stage = _stages([0, 1])[0]
    for i in range(6):
        scheduler.add(sequence(str(i), _prompt(i, 1), max_tokens=9, ignore_eos=True))
    for _ in range(3):
        step = scheduler.next_step()
        assert step is not None and len(step.step.chunks) == 6 and scheduler.next_step() is None
        scheduler.complete_step(stage.run(step))


def test_a_long_prompt_fills_the_pipeline_by_itself() -> None:
    scheduler = _scheduler(stages=3, steps=4)
    scheduler.add(sequence("a", _prompt(1, 100), max_tokens=2, ignore_eos=True))
    steps = [scheduler.next_step() for _ in range(4)]
    chunks = [chunk for one in steps if one is not None for chunk in one.step.chunks]
    assert [(c.start, c.count, c.last) for c in chunks] == [
        (0, 24, False),
        (24, 24, False),
        (48, 24, False),
        (72, 24, False),
    ]
    assert scheduler.next_step() is None
    stage = _stages([0, 1])[0]
    reported: list[TokenOutput] = []
    for one in steps:
        assert one is not None
        reported += scheduler.complete_step(stage.run(one))
    assert [(output.token_id, output.work) for output in reported] == [(None, 24)] * 4
    last = scheduler.next_step()
    assert last is not None and last.step.chunks[0].last and scheduler.next_step() is None


def test_a_failed_step_ends_its_sequences_and_no_others() -> None:
    stages = _stages([0, 1, 2, 3], tied=True)
    pipeline = pipeline_of(stages, StepLimits(sequences=8, prefill_tokens=24, shared_prefill_tokens=16))
    prompts = {str(i): _prompt(i, 6 + i) for i in range(6)}
    for request_id, prompt in prompts.items():
        pipeline.add(sequence(request_id, prompt, max_tokens=20, ignore_eos=True))
    tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    failed: set[str] = set()
    turns = 0
    while pipeline.has_work:
        turns += 1
        if turns in (12, 20):
            stages[turns // 12].fail_next()
        for output in pipeline.step():
            if output.error:
                failed.add(output.request_id)
            elif output.token_id is not None:
                assert output.request_id not in failed
                tokens[output.request_id].append(output.token_id)
    assert 0 < len(failed) < len(prompts)
    for request_id, prompt in prompts.items():
        expected = continuation(prompt, 20, VOCABULARY)
        found = tokens[request_id]
        assert found == (expected[: len(found)] if request_id in failed else expected)
    assert [stage.sequences for stage in stages] == [0, 0, 0]


def test_a_moved_sequence_exports_its_kv_with_the_step_that_closes_it() -> None:
    scheduler = _scheduler(limits=StepLimits(sequences=1, prefill_tokens=24, shared_prefill_tokens=24))
    for i in range(2):
        scheduler.add(sequence(str(i), _prompt(i, 30), max_tokens=4, ignore_eos=True))
    first = scheduler.next_step()
    assert first is not None and [one.call for one in first.step.opened] == ["0"]
    name = scheduler.move("0")
    assert name == first.step.opened[0].sequence
    assert scheduler.move("1") == ""  # no stage holds it yet
    scheduler.check_integrity()
    last = scheduler.next_step()  # behind the first one: the new engine waits for its K and V
    assert last is not None and (last.step.closed, last.step.exported) == ((name,), (name,))
    assert last.step.chunks == () and scheduler.next_step() is None
    scheduler.complete_step(StageOutput(step=first.step, hidden=None))
    # A stage that did not receive it gets it again.
    assert scheduler.fail_step(last.step.number, "lost") == []
    again = scheduler.next_step()
    assert again is not None and (again.step.closed, again.step.exported) == ((name,), (name,))
    scheduler.complete_step(StageOutput(step=again.step, hidden=None))
    assert not scheduler.has_work


def test_an_export_does_not_wait_for_a_free_step() -> None:
    scheduler = _scheduler(steps=2)
    for i in range(2):
        scheduler.add(sequence(str(i), _prompt(i, 60), max_tokens=4, ignore_eos=True))
    steps = [scheduler.next_step() for _ in range(2)]
    assert all(steps) and scheduler.next_step() is None
    name = scheduler.move("0")
    kept = scheduler.next_step()
    assert kept is not None and (kept.step.exported, kept.step.chunks) == ((name,), ())
    assert scheduler.next_step() is None
    for step in [*steps, kept]:
        assert step is not None
        scheduler.complete_step(StageOutput(step=step.step, hidden=None))
    scheduler.check_integrity()
    assert scheduler.next_step() is not None  # the other one continues


def test_names_have_the_prefix() -> None:
    shape = PipelineShape(stages=2, pages=64, context=512, vocabulary=VOCABULARY, steps=3)
    scheduler = PipelineScheduler(
        shape, StepLimits(sequences=8, prefill_tokens=24, shared_prefill_tokens=16), names="run-"
    )
    scheduler.add(sequence("a", _prompt(0, 5), max_tokens=4, ignore_eos=True))
    first = scheduler.next_step()
    assert first is not None and [one.sequence for one in first.step.opened] == ["run-0"]
    assert scheduler.move("a") == "run-0"


def test_a_name_is_not_used_again() -> None:
    scheduler = _scheduler()
    stage = _stages([0, 1])[0]
    scheduler.add(sequence("a", [1, 2], max_tokens=5))
    first = scheduler.next_step()
    assert first is not None
    scheduler.cancel("a")
    scheduler.add(sequence("a", [3], max_tokens=5))
    assert scheduler.complete_step(stage.run(first)) == []  # of the first one
    first = scheduler.next_step()
    assert first is not None and first.step.closed == ("0",) and first.step.opened[0].sequence == "1"
    (reported,) = scheduler.complete_step(stage.run(first))
    assert reported.token_id == continuation([3], 1, VOCABULARY)[0]


def test_a_head_that_forgets_a_token_ends_the_sequence() -> None:
    scheduler = _scheduler()
    scheduler.add(sequence("a", [1, 2]))
    first = scheduler.next_step()
    assert first is not None
    (reported,) = scheduler.complete_step(StageOutput(step=first.step, hidden=None))
    assert "returned no token" in reported.error and not scheduler.sequences


def test_what_can_never_run_is_refused() -> None:
    scheduler = _scheduler(pages=2)
    assert scheduler.max_sequence_tokens == 32
    with pytest.raises(OutOfKvCache):
        scheduler.add(sequence("a", [1] * 32))
    with pytest.raises(InvalidSequence):
        scheduler.add(sequence("a", [VOCABULARY]))
    assert not scheduler.has_work
