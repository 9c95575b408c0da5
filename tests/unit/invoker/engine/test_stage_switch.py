"""Sequences of a pipeline continue in a whole engine, by their tokens or with K and V: no token changes."""

import logging
import random
from dataclasses import replace

import pytest
import torch

from benchmarks.engine.local_pipeline import LocalPipeline
from invoker.engine.contract import NewSequence
from invoker.engine.decoder import DecoderEngine
from invoker.engine.factory import kv_bytes_needed
from invoker.engine.kv.cache import KvPool, KvShape
from invoker.engine.kv.slices import KvSlice
from invoker.engine.scheduling.scheduler import StepLimits
from invoker.engine.scheduling.sequence_table import InvalidSequence
from invoker.engine.stage_contract import OutOfStep, StageInput, rows_as_bytes, rows_from_bytes
from tests.fixtures.checkpoints import LAYERS, VOCABULARY
from tests.fixtures.engine import cached_image, make_decoder, run_all, sequence
from tests.fixtures.stage import make_stages, pipeline_of

TOKENS = 24


def _requests(count: int = 6) -> list[NewSequence]:
    rng = random.Random(4)
    drawn = {"temperature": 1.0, "top_p": 0.9, "seed": 11}
    samplings: list[dict[str, object]] = [
        {},
        drawn,
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {**drawn, "presence_penalty": 1.0, "min_p": 0.01},
        {"logit_bias": ((5, 3.0), (6, -100.0)), "repetition_penalty": 0.9},
        {**drawn, "allowed_token_ids": tuple(range(10, 40)), "frequency_penalty": 2.0},
    ]
    return [
        sequence(
            str(i),
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 90))],
            max_tokens=TOKENS,
            ignore_eos=True,
            **samplings[i],
        )
        for i in range(count)
    ]


def _some_steps(pipeline: LocalPipeline, steps: int) -> dict[str, list[int]]:
    """Return the tokens of `steps` steps."""
    seen: dict[str, list[int]] = {request.request_id: [] for request in _requests()}
    for _ in range(steps):
        for output in pipeline.step():
            if output.token_id is not None:
                seen[output.request_id].append(output.token_id)
    return seen


def _rest(engine: DecoderEngine) -> tuple[dict[str, list[int]], int]:
    """Return the generated tokens, and the number of tokens that were run."""
    tokens: dict[str, list[int]] = {}
    work = 0
    while engine.has_work:
        for output in engine.step():
            assert not output.error, output.error
            work += output.work
            if output.token_id is not None:
                tokens.setdefault(output.request_id, []).append(output.token_id)
    engine.check_integrity()
    return tokens, work


@pytest.mark.parametrize("steps", [3, 12, 40])
@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "gpt2"])
@pytest.mark.parametrize("moves", [False, True], ids=["recomputed", "moved"])
def test_a_switch_changes_no_token(kind: str, steps: int, moves: bool) -> None:
    requests = _requests()
    expected = run_all(make_decoder(kind), requests)
    stages = make_stages(kind, (0, 1, 3, 4))
    pipeline = pipeline_of(stages)
    for request in requests:
        pipeline.add(request)
    seen = _some_steps(pipeline, steps)
    # Steps are in flight: their results are on some stages only.
    assert pipeline.scheduler.steps_in_flight
    names = {request.request_id: pipeline.scheduler.stage_name(request.request_id) for request in requests}
    left = [
        replace(one, generated_ids=tuple(seen[one.request_id]))
        for one in requests
        if len(seen[one.request_id]) < TOKENS
    ]
    whole = make_decoder(kind)
    saved = 0
    for one in left:
        kv: list[KvSlice] = []
        if moves:
            try:
                kv = [stage.export_kv(names[one.request_id]) for stage in stages]
            except (OutOfStep, InvalidSequence):
                kv = []  # it has not reached all stages
        whole.add(one, kv)
        known = len(one.prompt_ids) + len(one.generated_ids)
        saved += min([known - 1, *(part.tokens for part in kv)]) if kv else 0
    rest, work = _rest(whole)
    for request in requests:
        assert seen[request.request_id] + rest.get(request.request_id, []) == expected[request.request_id]
    lengths = {one.request_id: len(one.prompt_ids) + TOKENS - 1 for one in left}
    assert work == sum(lengths.values()) - saved
    assert (saved > 0) == moves


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_a_pipeline_exports_is_what_a_whole_engine_holds(kind: str) -> None:
    request = _requests(1)[0]
    engine = make_decoder(kind)
    engine.add(request)
    pipeline = pipeline_of(make_stages(kind, (0, 3, 4)), steps=1)
    pipeline.add(request)
    for one in (engine, pipeline):
        tokens = 0
        while tokens < 5:
            tokens += sum(output.token_id is not None for output in one.step())
    own = engine.export_kv("0")
    parts = [stage.export_kv(pipeline.scheduler.stage_name("0")) for stage in pipeline.stages]
    parts.insert(1, pipeline.stages[0].export_kv("0", (1, 3)))
    assert own.tokens == len(request.prompt_ids) + 4
    assert [(part.first, part.last) for part in parts] == [(0, 3), (1, 3), (3, 4)]
    for part in parts:
        torch.testing.assert_close(part.data, own.data[part.first : part.last], rtol=1e-4, atol=1e-4)
        assert part.data.is_contiguous() and part.nbytes == part.data.numel() * 4
    engine.cancel("0")
    pipeline.close()


@pytest.mark.parametrize("apart", [False, True])
def test_exported_kv_comes_back_from_any_pages(apart: bool) -> None:
    shape = KvShape(layers=3, heads=2, head_dim=8, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    pools = [
        KvPool(shape, torch.randint(0, 100, (9 * shape.page_bytes,), dtype=torch.uint8, generator=generator))
        for _ in range(2)
    ]
    pages = (7, 2, 5) if apart else (3, 4, 5)
    layers = slice(1, 3)
    found = pools[0].read(layers, (1, 2, 8) if apart else (1, 2, 3), 41)
    pools[1].fill(layers, pages, found)
    assert torch.equal(pools[1].read(layers, pages, 41), found)
    untouched = pools[1].read(slice(0, 1), pages, 48)
    pools[1].fill(layers, pages, torch.zeros_like(found))
    assert torch.equal(pools[1].read(slice(0, 1), pages, 48), untouched)


def test_moved_kv_is_dropped_where_a_sequence_is_preempted(caplog: pytest.LogCaptureFixture) -> None:
    requests = _requests()
    expected = run_all(make_decoder("llama"), requests)
    source = make_decoder("llama", max_sequences=6, prefill_budget=400, shared_prefill_budget=400)
    for request in requests:
        source.add(request)
    seen = {output.request_id: [output.token_id] for output in source.step()}
    spec, _, _ = cached_image("llama")
    page = kv_bytes_needed("LlamaForCausalLM", spec.config, spec.dtype, 1, 1)
    narrow = make_decoder("llama", kv=11 * page, max_sequences=6)
    for request in requests:
        first = seen[request.request_id]
        assert first[0] is not None
        kv = [source.export_kv(request.request_id, (2, LAYERS)), source.export_kv(request.request_id, (0, 2))]
        narrow.add(replace(request, generated_ids=first), kv)
    with caplog.at_level(logging.INFO, "invoker.engine"):
        rest, _ = _rest(narrow)
    assert "preempted, its KV cache" in caplog.text
    assert {name: [*first, *rest[name]] for name, first in seen.items()} == expected


def test_kv_that_does_not_fit_is_refused() -> None:
    source = make_decoder("llama")
    source.add(sequence("a", [1, 2, 3]))
    source.step()
    kv = source.export_kv("a")
    assert kv.tokens == 3

    def part(first: int, last: int, data: torch.Tensor = kv.data) -> KvSlice:
        return KvSlice(first=first, last=last, data=data[first:last])

    engine = make_decoder("llama")
    for slices in (
        [part(0, 2)],
        [part(0, 2), part(3, 4)],
        [part(0, 3), part(2, 4)],
        [part(1, 4)],
        [part(0, 4, kv.data.double())],
        [part(0, 4, kv.data[..., :8])],
        [KvSlice(first=0, last=4, data=kv.data[:3])],
    ):
        with pytest.raises(InvalidSequence):
            engine.add(sequence("a", [1, 2, 3], [4]), slices)
    assert not engine.has_work
    with pytest.raises(InvalidSequence, match="not in"):
        source.export_kv("a", (2, 5))
    with pytest.raises(InvalidSequence, match="no sequence"):
        source.export_kv("b")


def test_a_stage_refuses_what_does_not_follow() -> None:
    first, second = make_stages("llama", (0, 2, 4))
    scheduler = pipeline_of(
        [first, second], StepLimits(sequences=8, prefill_tokens=24, shared_prefill_tokens=16)
    ).scheduler
    scheduler.add(sequence("a", list(range(30))))
    one, two = scheduler.next_step(), scheduler.next_step()
    assert one is not None and two is not None
    with pytest.raises(OutOfStep, match="does not follow"):
        first.run(two)
    with pytest.raises(OutOfStep, match="23 rows"):
        first.run(StageInput(step=one.step, data=one.data[:23]))
    with pytest.raises(OutOfStep, match="open already"):
        first.run(one)
    with pytest.raises(OutOfStep, match="2 rows for the 0 sampled tokens"):
        first.finish(StageInput(step=one.step, data=torch.zeros(2, 64)))
    with pytest.raises(OutOfStep, match="no sequence"):
        second.export_kv("0")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_pass_a_buffer_without_a_copy(dtype: str) -> None:
    rows = torch.arange(12, dtype=torch.float32).view(3, 4).to(getattr(torch, dtype))
    sent = rows_as_bytes(rows)
    assert sent.nbytes == rows.nbytes and sent.format == "B" and sent.ndim == 1
    received = bytearray(sent)
    found = rows_from_bytes(memoryview(received), rows.dtype, 4)
    assert torch.equal(found, rows)
    rows[0, 0] = 7  # both are views
    received[:] = sent
    assert found[0, 0] == 7
    assert rows_as_bytes(rows[:0]).nbytes == 0
    assert rows_from_bytes(memoryview(b""), rows.dtype, 4).shape == (0, 4)
