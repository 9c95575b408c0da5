"""The decoder engine against transformers' full forward, and its behaviour at the edges."""

import copy
import logging
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from invoker.engine.contract import NewSequence, OutOfKvCache
from invoker.engine.decoder import DecoderEngine
from invoker.engine.factory import TorchEngineFactory, kv_bytes_needed
from invoker.engine.kv.export import KvExport, KvRange
from invoker.engine.paths import LayerPath
from invoker.engine.scheduling.scheduler import StepPlan
from invoker.engine.scheduling.sequence_table import InvalidSequence
from tests.fixtures.checkpoints import CONTEXT, VOCABULARY, make_model, write_checkpoint
from tests.fixtures.engine import KINDS_AND_PATHS, cached_image, load_image, make_decoder, run_all, sequence

TOKENS = 32


def _prompts(count: int, longest: int = 60, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def _reference_logits(model: torch.nn.Module, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return the logits of a full forward without cache at each position of `output`.

    One forward suffices: if its best tokens are `output`, then by causality a forward of every prefix would
    have chosen the same.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float()


@pytest.mark.parametrize(("kind", "path"), KINDS_AND_PATHS)
def test_greedy_tokens_equal_the_full_forward(kind: str, path: LayerPath) -> None:
    _, _, model = cached_image(kind)
    prompts = _prompts(16)
    engine = make_decoder(kind, path=path)
    found = run_all(engine, [sequence(str(i), p, ignore_eos=True) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        output = found[str(i)]
        assert len(output) == TOKENS
        assert output == _reference_logits(model, prompt, output).argmax(-1).tolist()


@pytest.mark.parametrize("pages", [200, 56])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_long_sequences_give_the_full_forwards_tokens_in_little_room_too(kind: str, pages: int) -> None:
    spec, _, model = cached_image(kind)
    page = kv_bytes_needed(spec.manifest.architecture, spec.config, spec.dtype, 1, 1)
    # In little room sequences give way, and others get pages that lie apart.
    engine = make_decoder(kind, kv=pages * page, prefill_budget=100)
    prompts = _prompts(8, 300, seed=3)
    found = run_all(engine, [sequence(str(i), p, ignore_eos=True) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert found[str(i)] == _reference_logits(model, prompt, found[str(i)]).argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_company_changes_no_token(kind: str) -> None:
    # Alone, in batches that are computed by columns, and in larger ones.
    requests = [sequence(str(i), p, max_tokens=8, ignore_eos=True) for i, p in enumerate(_prompts(40, 12))]
    engine = make_decoder(kind, max_sequences=40)
    found = [run_all(engine, requests, at_once=batch) for batch in (1, 6, 40)]
    assert found[0] == found[1] == found[2]


def test_a_sharded_checkpoint_runs_alike(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, sharded=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    spec, region = load_image(tmp_path)
    engine = DecoderEngine(spec, region, 1 << 20)
    requests = [sequence(str(i), p) for i, p in enumerate(_prompts(3))]
    assert run_all(engine, requests) == run_all(make_decoder("llama"), requests)


def test_gpt2_without_prefix_runs_alike(tmp_path: Path) -> None:
    make_model("gpt2").transformer.save_pretrained(tmp_path)
    spec, region = load_image(tmp_path)
    assert "wte.weight" in {entry.name for entry in spec.manifest.tensors}
    engine = DecoderEngine(spec, region, 1 << 20)
    requests = [sequence(str(i), p) for i, p in enumerate(_prompts(3))]
    assert run_all(engine, requests) == run_all(make_decoder("gpt2"), requests)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("llama", LayerPath.FUSED),
        ("llama", LayerPath.HUGGING_FACE),
        ("mistral", LayerPath.FUSED),
        ("qwen3", LayerPath.FUSED),
        ("gpt2", LayerPath.HUGGING_FACE),
    ],
)
def test_bfloat16_tokens_are_greedy_up_to_near_ties(kind: str, path: LayerPath) -> None:
    _, _, model = cached_image(kind, "bfloat16")
    exact = copy.deepcopy(model).float()
    prompts = _prompts(6)
    found = run_all(
        make_decoder(kind, "bfloat16", path=path),
        [sequence(str(i), p, ignore_eos=True) for i, p in enumerate(prompts)],
    )
    for i, prompt in enumerate(prompts):
        logits = _reference_logits(exact, prompt, found[str(i)])
        chosen = logits.gather(1, torch.tensor(found[str(i)])[:, None])[:, 0]
        # transformers' own error in bfloat16, once on the best logit and once on the chosen.
        error = (_reference_logits(model, prompt, found[str(i)]) - logits).abs().max()
        assert (logits.max(-1).values - chosen).max() <= 2 * error


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_preemption_changes_no_token(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    spec, _, _ = cached_image(kind)
    requests = [sequence(str(i), p, ignore_eos=True) for i, p in enumerate(_prompts(8))]
    page = kv_bytes_needed(spec.manifest.architecture, spec.config, spec.dtype, 1, 1)
    with caplog.at_level(logging.INFO, "invoker.engine"):
        scarce = run_all(make_decoder(kind, kv=8 * page), requests)
    assert "preempted, its KV cache" in caplog.text
    assert scarce == run_all(make_decoder(kind), requests)


@pytest.mark.parametrize("cut", [0, 1, 7, 19])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_seeded_sampling_continues_identically(kind: str, cut: int) -> None:
    prompt = _prompts(1)[0]
    values = {"max_tokens": 20, "temperature": 1.1, "top_p": 0.95, "seed": 42, "ignore_eos": True}
    whole = run_all(make_decoder(kind), [sequence("a", prompt, **values)])["a"]
    # Another engine, and company that changes the batch.
    others = [sequence(f"x{i}", p, temperature=1.0, seed=i) for i, p in enumerate(_prompts(3, seed=9))]
    rest = run_all(make_decoder(kind), [*others, sequence("a", prompt, whole[:cut], **values)])["a"]
    assert whole[:cut] + rest == whole
    other_seed = run_all(make_decoder(kind), [sequence("a", prompt, **{**values, "seed": 43})])["a"]
    assert other_seed != whole


def test_sequences_end_for_the_right_reason() -> None:
    prompt = _prompts(1)[0]
    output = run_all(make_decoder("llama"), [sequence("a", prompt, ignore_eos=True)])["a"]
    third = output[2]
    assert third not in output[:2]

    def ends(request: NewSequence, context: int = CONTEXT) -> tuple[str, list[int]]:
        spec, region, _ = cached_image("llama")
        engine = DecoderEngine(replace(spec, context_length=context), region, 1 << 20)
        engine.add(request)
        seen, reason = [], ""
        while engine.has_work:
            for out in engine.step():
                assert out.token_id is not None
                seen.append(out.token_id)
                reason = out.finish_reason
        return reason, seen

    assert ends(sequence("a", prompt, eos_token_ids=(third,))) == ("stop", output[:3])
    assert ends(sequence("a", prompt, eos_token_ids=(third,), ignore_eos=True)) == ("length", output)
    assert ends(sequence("a", prompt, stop_token_ids=(third,), ignore_eos=True)) == ("stop", output[:3])
    assert ends(sequence("a", prompt, max_tokens=5)) == ("length", output[:5])
    assert ends(sequence("a", prompt, output[:4], max_tokens=5)) == ("length", output[4:5])
    assert ends(sequence("a", prompt), context=len(prompt) + 6) == ("length", output[:6])


@pytest.mark.parametrize("path", [LayerPath.FUSED, LayerPath.HUGGING_FACE])
def test_k_and_v_are_exported_layer_by_layer(path: LayerPath) -> None:
    engine = make_decoder("llama", path=path)
    prompts = {"a": list(range(1, 31)), "b": list(range(40, 90))}  # in steps of 24 tokens
    exports: dict[str, KvExport] = {}
    for name, prompt in prompts.items():
        engine.add(sequence(name, prompt))
        engine.export(name, partial(exports.__setitem__, name))
    engine.add(sequence("c", [5, 6, 7]))
    seen: list[tuple[int, int]] = []
    pool = engine._stage.pool
    while len(exports) < 2 or any(export.is_under_way for export in exports.values()):
        engine.step()
        assert pool.on_write is None
        seen += [part[2:] for export in exports.values() for part in _arrived(export)]
    for name, export in exports.items():
        engine.finish_export(name)
        copied = engine.export_kv(name)
        tokens = len(prompts[name])
        assert torch.equal(export.wait(0.0).data, copied.data[:, :, :tokens])
    assert (0, 24) in seen or (0, 21) in seen, "parts of a prompt are there before its end"
    with pytest.raises(InvalidSequence, match="does not export"):
        engine.finish_export("c")
    engine.close()


def test_a_cancelled_sequence_fails_its_export() -> None:
    engine, exports = make_decoder("llama"), list[KvExport]()
    engine.add(sequence("a", list(range(1, 60))))
    engine.export("a", exports.append)
    engine.step()
    engine.cancel("a")
    with pytest.raises(BrokenPipeError, match="the sequence has ended"):
        exports[0].wait(0.0)
    engine.close()


def _arrived(export: KvExport) -> list[KvRange]:
    try:
        return [next(export.arriving(0.0))]
    except TimeoutError:
        return []


def test_the_whole_kv_cache_is_usable() -> None:
    spec, region, _ = cached_image("llama")
    page = kv_bytes_needed("LlamaForCausalLM", spec.config, spec.dtype, 1, 1)
    engine = DecoderEngine(spec, region, 2 * page)
    assert engine.max_sequence_tokens == 32
    found = run_all(engine, [sequence(str(i), [5, 6, 7], max_tokens=100, ignore_eos=True) for i in range(3)])
    assert {len(tokens) for tokens in found.values()} == {29}


def test_what_cannot_run_is_refused_at_once() -> None:
    engine = make_decoder("llama")
    engine.add(sequence("a", [1, 2]))
    refused = {
        "running already": sequence("a", [1]),
        "prompt is empty": sequence("b", []),
        "outside": sequence("b", [1, VOCABULARY]),
        "generated already": sequence("b", [1], [2, 3], max_tokens=2),
        "top_p": sequence("b", [1], top_p=0.0),
    }
    for message, request in refused.items():
        with pytest.raises(InvalidSequence, match=message):
            engine.add(request)
    with pytest.raises(OutOfKvCache):
        engine.add(sequence("b", [1] * CONTEXT))
    assert engine.sequences == 1


def test_a_cancelled_sequence_is_gone_and_its_pages_are_free() -> None:
    engine = make_decoder("llama")
    for name in ("a", "b"):
        engine.add(sequence(name, [3, 4, 5]))
    assert {output.request_id for output in engine.step()} == {"a", "b"}
    engine.cancel("a")
    engine.cancel("a")
    assert {output.request_id for output in engine.step()} == {"b"}
    engine.cancel("b")
    assert engine.step() == [] and not engine.has_work
    engine.check_integrity()


def test_a_step_accounts_for_parts_of_a_prompt_too() -> None:
    engine = make_decoder("llama", max_sequences=2, prefill_budget=10)
    engine.add(sequence("a", [9] * 30))
    outputs = [engine.step() for _ in range(3)]
    assert [[(o.token_id is None, o.finish_reason, o.error) for o in step] for step in outputs] == [
        [(True, "", "")],
        [(True, "", "")],
        [(False, "", "")],
    ]
    assert [step[0].work for step in outputs] == [10, 10, 10]


def test_numbers_that_are_none_end_only_their_own_sequence() -> None:
    spec, region, _ = cached_image("llama")
    poisoned = region.copy()
    entry = next(e for e in spec.manifest.tensors if e.name == "model.embed_tokens.weight")
    row = entry.nbytes // VOCABULARY
    poisoned.buffer[entry.offset + 7 * row : entry.offset + 8 * row] = b"\xff" * row
    engine = DecoderEngine(spec, poisoned, 1 << 20)
    prompt = [5, 6, 8]
    expected = run_all(make_decoder("llama"), [sequence("good", prompt)])["good"]
    assert 7 not in expected
    engine.add(sequence("bad", [5, 7, 8]))
    assert [o.error for o in engine.step()] == ["the model's output is not a number"]
    # The pages that hold the bad numbers are handed on.
    assert run_all(engine, [sequence("good", prompt)])["good"] == expected


class _FailsOnce(DecoderEngine):
    """An engine whose second step runs out of memory."""

    steps = 0

    def _run(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        self.steps += 1
        if self.steps == 2:
            raise torch.OutOfMemoryError("no memory left")
        return super()._run(plan)


def test_a_failed_step_ends_its_sequences_and_the_engine_goes_on() -> None:
    spec, region, _ = cached_image("llama")
    engine = _FailsOnce(spec, region, 1 << 20, max_sequences=2)
    for name in ("a", "b", "c"):
        engine.add(sequence(name, [1, 2, 3]))
    engine.step()
    failed = engine.step()
    assert [(o.request_id, "no memory left" in o.error) for o in failed] == [("a", True), ("b", True)]
    engine.check_integrity()
    tokens = []
    while engine.has_work:
        tokens += [output.token_id for output in engine.step()]
    assert tokens == run_all(make_decoder("llama"), [sequence("c", [1, 2, 3])])["c"]


def test_a_closed_engine_lets_go_of_its_memory() -> None:
    spec, region, _ = cached_image("llama")
    own = region.copy()
    kv = own.copy()
    engine = TorchEngineFactory().make(spec, own, kv, max_concurrency=8)
    assert isinstance(engine, DecoderEngine)
    run_all(engine, [sequence("a", [1, 2, 3], max_tokens=2)])
    engine.close()
    engine.close()
    own.close()
    kv.close()


def test_memory_needs_are_those_of_the_engine() -> None:
    spec, region, _ = cached_image("qwen3")
    manifest = spec.manifest
    needed = kv_bytes_needed(manifest.architecture, spec.config, spec.dtype, 40, 3)
    engine = DecoderEngine(spec, region, needed)
    assert engine.max_sequence_tokens == 3 * 48  # three sequences of three pages
    assert kv_bytes_needed("BertModel", {}, "float32", 40, 3) == 0
