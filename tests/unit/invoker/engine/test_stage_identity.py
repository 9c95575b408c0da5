"""A chain of stages yields the whole engine's tokens, and reads no bytes that have not arrived."""

import copy
import functools
import random
from dataclasses import replace

import pytest
import torch

from invoker.engine.contract import NewSequence
from invoker.engine.factory import kv_bytes_needed
from invoker.engine.image_ranges import layer_byte_ranges
from invoker.engine.paths import LayerPath
from invoker.engine.scheduling.scheduler import StepLimits
from invoker.engine.stage_engine import StageEngine
from tests.fixtures.checkpoints import LAYERS, VOCABULARY
from tests.fixtures.engine import cached_image, make_decoder, run_all, sequence
from tests.fixtures.stage import make_stages, pipeline_of, run_pipeline

CUTS = {"halves": (0, 2, 4), "uneven": (0, 1, 4), "three": (0, 1, 2, 4), "four": (0, 1, 2, 3, 4)}
FUSED, HF = LayerPath.FUSED, LayerPath.HUGGING_FACE
CLOSELY = [("llama", FUSED), ("llama", HF), ("qwen2", FUSED), ("qwen2-tied", HF), ("gpt2", HF)]
IN_PASSING = [("llama3-tied", FUSED), ("qwen3-tied", FUSED), ("mistral", FUSED), ("phi3", HF)]


def _prompts(count: int, longest: int = 60, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def _mixed(count: int, seed: int) -> list[NewSequence]:
    """Greedy and drawn sequences of all lengths."""
    rng = random.Random(seed)
    found = []
    for i, prompt in enumerate(_prompts(count, seed=seed)):
        length = rng.randint(1, 20)
        drawn = {"temperature": 0.9, "top_p": 0.95, "seed": i} if i % 2 else {}
        found.append(sequence(str(i), prompt, max_tokens=length, eos_token_ids=(7, 8), **drawn))
    return found


def _assert_empty(stages: list[StageEngine]) -> None:
    for stage in stages:
        stage.check_integrity()
        assert "0 sequences, <PageAllocator 0 of" in repr(stage)


@functools.cache
def _expected(kind: str, path: LayerPath) -> dict[str, list[int]]:
    return run_all(make_decoder(kind, path=path), _mixed(10, seed=3))


@pytest.mark.parametrize(
    ("kind", "path", "cut"),
    [(*one, cut) for one in CLOSELY for cut in CUTS] + [(*one, "three") for one in IN_PASSING],
)
def test_tokens_equal_the_whole_engines(kind: str, path: LayerPath, cut: str) -> None:
    stages = make_stages(kind, CUTS[cut], path=path)
    assert run_pipeline(pipeline_of(stages), _mixed(10, seed=3)) == _expected(kind, path)
    _assert_empty(stages)


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "gpt2"])
def test_64_requests_that_come_and_go(kind: str) -> None:
    requests = _mixed(64, seed=5)
    stages = make_stages(kind, CUTS["three"])
    limits = StepLimits(sequences=32, prefill_tokens=64, shared_prefill_tokens=48)
    found = run_pipeline(pipeline_of(stages, limits), requests, at_once=32)
    assert found == run_all(make_decoder(kind, max_sequences=32), requests, at_once=32)
    _assert_empty(stages)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_little_room_changes_no_token(kind: str) -> None:
    requests = _mixed(10, seed=6)
    whole = make_decoder(kind)
    # A stage with fewer pages than the others limits the pipeline.
    stages = make_stages(kind, (0, 1, 2, 4), kv=1 << 20)
    spec, region, _ = cached_image(kind)
    page = kv_bytes_needed(spec.manifest.architecture, spec.config, spec.dtype, 1, 1, layers=1)
    stages[1] = StageEngine(replace(spec, layers=(1, 2)), region, 8 * page)
    found = run_pipeline(pipeline_of(stages), requests)
    assert found == run_all(whole, requests)
    _assert_empty(stages)


def test_cancelled_sequences_disturb_no_other() -> None:
    requests = _mixed(8, seed=9)
    expected = run_all(make_decoder("llama-tied"), requests)
    stages = make_stages("llama-tied", CUTS["four"])
    pipeline = pipeline_of(stages)
    for request in requests:
        pipeline.add(request)
    gone = {"2", "5"}
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps = 0
    while pipeline.has_work:
        steps += 1
        if steps == 9:  # some of their steps are in flight
            for request_id in gone:
                pipeline.cancel(request_id)
        for output in pipeline.step():
            assert steps < 9 or output.request_id not in gone
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
    for request_id, found in tokens.items():
        assert found == expected[request_id][: len(found) if request_id in gone else None]
    _assert_empty(stages)


def test_bfloat16_is_greedy_up_to_near_ties() -> None:
    _, _, model = cached_image("llama", "bfloat16")
    exact = copy.deepcopy(model).float()
    requests = [
        sequence(str(i), p, max_tokens=16, ignore_eos=True) for i, p in enumerate(_prompts(5, seed=2))
    ]
    found = run_pipeline(pipeline_of(make_stages("llama", CUTS["three"], "bfloat16")), requests)
    for request in requests:
        prompt, output = list(request.prompt_ids), found[request.request_id]
        with torch.inference_mode():
            own, theirs = (
                m(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
                for m in (exact, model)
            )
        chosen = own.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (own.max(-1).values - chosen).max() <= 2 * (theirs - own).abs().max()


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2"])
def test_the_bytes_of_all_stages_are_the_image(kind: str) -> None:
    manifest = cached_image(kind)[0].manifest
    parts = [layer_byte_ranges(manifest, i, i + 1) for i in range(LAYERS)]
    edges = sorted(span for part in parts for span in part)
    assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
    assert edges[-1][1] == manifest.nbytes
    assert layer_byte_ranges(manifest, 0, LAYERS) == ((0, manifest.nbytes),)
    assert all(len(part) == 1 for part in parts), "a layer needs bytes from far away"
    assert [part[0][0] for part in parts] == sorted(part[0][0] for part in parts)
