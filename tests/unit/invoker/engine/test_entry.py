"""Prompts enter an engine behind layers that ran elsewhere: the tokens are those of the whole engine."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invoker.engine.contract import NewSequence
from invoker.engine.decoder import DecoderEngine
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.entry import EntryFormat, LayerEntry
from invoker.engine.kv.export import KvExport
from invoker.engine.layer_segments import layer_segments
from invoker.engine.paths import LayerPath
from invoker.engine.scheduling.scheduler import Chunk
from invoker.engine.scheduling.sequence_table import InvalidSequence
from invoker.engine.stage_contract import OpenSequence, StageChunk, StageInput, StageStep
from invoker.engine.stage_engine import StageEngine
from tests.fixtures.checkpoints import LAYERS, VOCABULARY
from tests.fixtures.engine import KINDS_AND_PATHS, make_decoder, run_all, sequence
from tests.fixtures.stage import make_stages


def _requests(count: int, seed: int) -> list[NewSequence]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, 70))] for _ in range(count)]
    return [sequence(str(i), prompt, max_tokens=9, ignore_eos=True) for i, prompt in enumerate(prompts)]


def _entry(stage: StageEngine, request: NewSequence) -> LayerEntry:
    """Run a prompt through a stage of the first layers."""
    name, tokens = request.request_id, list(request.prompt_ids)
    opening = OpenSequence(sequence=name, max_tokens=len(tokens), sampling=request.sampling)
    chunk = StageChunk(sequence=name, start=0, count=len(tokens), last=False)
    step = StageStep(number=0, closed=(), opened=(opening,), chunks=(chunk,))
    output = stage.run(StageInput(step=step, data=torch.tensor(tokens)))
    assert output.hidden is not None
    return LayerEntry(rows=output.hidden, kv=stage.export_kv(name))


def _run(engine: DecoderEngine, requests: list[NewSequence], entries: dict[str, LayerEntry]) -> dict:
    """Generate all sequences, those with an entry from there on."""
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    left = list(reversed(requests))
    while left or engine.has_work:
        for _ in range(min(2, len(left))):  # some decode already when others enter
            request = left.pop()
            engine.add(request, (), entries.get(request.request_id))
        for output in engine.step():
            assert not output.error and output.work >= 1
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
        engine.check_integrity()
    return tokens


@pytest.mark.parametrize(("kind", "path"), KINDS_AND_PATHS)
def test_tokens_are_those_of_the_whole_engine(kind: str, path: LayerPath) -> None:
    requests = _requests(10, seed=4)
    stages = {layers: make_stages(kind, (0, layers, LAYERS), path=path)[0] for layers in range(1, LAYERS)}
    entries = {
        one.request_id: _entry(stages[number % LAYERS], one)
        for number, one in enumerate(requests)
        if number % LAYERS  # the others run whole
    }
    assert len({one.layers for one in entries.values()}) == LAYERS - 1
    expected = run_all(make_decoder(kind, path=path), requests)
    assert _run(make_decoder(kind, path=path, shared_prefill_budget=8), requests, entries) == expected


def test_those_that_are_preempted_run_through_all_layers() -> None:
    requests = _requests(10, seed=6)
    stage = make_stages("llama", (0, 2, LAYERS))[0]
    entries = {one.request_id: _entry(stage, one) for one in requests}
    whole = make_decoder("llama")
    scarce = make_decoder("llama", kv=8 * whole.kv_shape.page_bytes)
    assert _run(scarce, requests, entries) == run_all(whole, requests)


def test_what_is_exported_has_all_layers() -> None:
    (request,) = _requests(1, seed=1)
    stage = make_stages("llama", (0, 2, LAYERS))[0]
    found: list[KvExport] = []
    engine, whole = make_decoder("llama"), make_decoder("llama")
    engine.add(request, (), _entry(stage, request))
    engine.export(request.request_id, found.append)
    whole.add(request)
    while not any(output.token_id is not None for output in engine.step()):
        pass
    while not any(output.token_id is not None for output in whole.step()):
        pass
    engine.finish_export(request.request_id)
    exported, expected = found[0].wait(1.0), whole.export_kv(request.request_id)
    torch.testing.assert_close(exported.data, expected.data)


def test_what_does_not_fit_the_model_is_refused() -> None:
    first, second = _requests(2, seed=2)
    stage = make_stages("llama", (0, 2, LAYERS))[0]
    entry, engine = _entry(stage, first), make_decoder("llama")
    shifted = replace(entry.kv, first=1, last=3)
    for wrong in (
        replace(entry, rows=entry.rows[:-1]),
        replace(entry, rows=entry.rows.double()),
        replace(entry, kv=shifted),
        _entry(stage, second),
    ):
        with pytest.raises(InvalidSequence):
            engine.add(first, (), wrong)
    assert not engine.has_work


FORMAT = EntryFormat(
    kv=KvShape(layers=4, heads=2, head_dim=3, dtype=torch.float32),
    row_dtype=torch.float16,
    row_items=5,
    step_tokens=16,
)


def test_what_is_sent_is_read_in_place() -> None:
    tokens = 7
    hidden = bytearray(random.Random(1).randbytes(tokens * FORMAT.row_bytes))
    kv = bytearray(random.Random(2).randbytes(FORMAT.kv_bytes(3, tokens)))
    entry = FORMAT.parse(3, tokens, memoryview(hidden), memoryview(kv))
    FORMAT.check(entry, tokens)
    assert entry.rows.view(torch.uint8).numpy().tobytes() == hidden
    assert entry.kv.data.view(torch.uint8).numpy().tobytes() == kv and entry.layers == 3


@given(st.integers(-1, 5), st.integers(0, 3), st.integers(0, 200), st.integers(0, 600))
def test_no_other_size_is_read(layers: int, tokens: int, hidden: int, kv: int) -> None:
    fits = 0 < layers < 4 and tokens > 0
    fits = fits and (hidden, kv) == (tokens * FORMAT.row_bytes, FORMAT.kv_bytes(layers, tokens))
    try:
        FORMAT.parse(layers, tokens, memoryview(bytearray(hidden)), memoryview(bytearray(kv)))
    except InvalidSequence:
        assert not fits
    else:
        assert fits


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_each_chunk_runs_through_its_layers_once(firsts: list[int]) -> None:
    chunks = [Chunk(request_id=str(i), start=0, count=2, pages=(i,), last=True) for i in range(len(firsts))]
    rows = torch.zeros((2, FORMAT.row_items), dtype=FORMAT.row_dtype)
    six = replace(FORMAT, kv=replace(FORMAT.kv, layers=6))
    entries = {
        str(i): six.parse(
            first,
            2,
            memoryview(bytearray(rows.view(torch.uint8).numpy().tobytes())),
            memoryview(bytearray(six.kv_bytes(first, 2))),
        )
        for i, first in enumerate(firsts)
        if first
    }
    segments = layer_segments(chunks, entries, 6)
    assert [one.first for one in segments] == sorted(set(firsts)) and segments[-1].last == 6
    for i, first in enumerate(firsts):
        ran = [layer for one in segments if chunks[i] in one.chunks for layer in range(one.first, one.last)]
        assert ran == list(range(first, 6))
