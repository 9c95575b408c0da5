"""Thirty decoder architectures: packed, bound, cut anywhere and run as transformers runs them."""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from invoker.engine.attention import ATTENTION
from invoker.engine.contract import ModelSpec, UnsupportedModel
from invoker.engine.decoder import DecoderEngine
from invoker.engine.factory import TorchEngineFactory
from invoker.engine.kv.cache import KvPool
from invoker.engine.layout import StepLayout, build_layout
from invoker.engine.scheduling.scheduler import Chunk
from invoker.engine.stage import StageExecutor
from invoker.engine.weights import bind
from registry.images.pack import IMAGE_FILE, pack_to_folder
from tests.fixtures.decoders import CONFIGS, LAYERS, VOCABULARY, write_decoder
from tests.fixtures.engine import MemoryRegion, load_image, run_all, sequence

LENGTHS = (1, 5, 9, 17, 24, 24, 30, 40)
NEAR_TIE = 1e-4  # of two logits: a batch computes their last bits in another order


@functools.cache
def _loaded(
    kind: str, dtype: str = "float32"
) -> tuple[ModelSpec, MemoryRegion, transformers.PreTrainedModel]:
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        model = write_decoder(kind, Path(folder))
        spec, region = load_image(Path(folder), dtype=dtype)
    return replace(spec, context_length=128), region, model


@pytest.mark.parametrize("kind", CONFIGS)
def test_its_tokens_are_those_of_transformers(kind: str) -> None:
    spec, region, model = _loaded(kind)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    requests = [sequence(str(i), prompt, ignore_eos=True) for i, prompt in enumerate(prompts)]
    engine = DecoderEngine(spec, region, 4 << 20, max_sequences=8, prefill_budget=24)
    found = run_all(engine, requests, at_once=4)
    for i, prompt in enumerate(prompts):
        tokens = found[str(i)]
        assert len(tokens) == 32
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(dim=-1).values - chosen).max() < NEAR_TIE


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_runs_in_bfloat16(kind: str) -> None:
    spec, region, model = _loaded(kind, "bfloat16")
    prompt = list(range(3, 30))
    engine = DecoderEngine(spec, region, 4 << 20, max_sequences=8, prefill_budget=24)
    tokens = run_all(engine, [sequence("0", prompt, max_tokens=8, ignore_eos=True)])["0"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    # Of the spread of its logits: the reference computes in float32.
    assert (logits.max(dim=-1).values - chosen).max() < 0.1 * logits.std() + 0.5
    whole = _logits(_stages(spec, region, (0, LAYERS)))
    assert torch.equal(whole, _logits(_stages(spec, region, (0, 1, 3, LAYERS))))


def _stages(spec: ModelSpec, region: MemoryRegion, cuts: Sequence[int]) -> list[StageExecutor]:
    stages = []
    for first, last in pairwise(cuts):
        bound = bind(replace(spec, layers=(first, last)), region)
        shape = bound.geometry.kv_shape(last - first, bound.dtype)
        pool = KvPool(shape, torch.zeros(8 * shape.page_bytes, dtype=torch.uint8))
        stages.append(StageExecutor(bound, pool))
    return stages


def _layouts(dtype: torch.dtype) -> list[StepLayout]:
    """Two prompts, a step of both, and one that mixes prompt and decoding."""
    pages = [(0, 1, 2, 3), (4, 5, 6, 7)]
    steps = [[(0, 20), (0, 7)], [(20, 1), (7, 1)], [(21, 30), (8, 1)]]
    return [
        build_layout(
            [
                Chunk(request_id=str(i), start=start, count=count, pages=pages[i], last=True)
                for i, (start, count) in enumerate(step)
            ],
            dtype,
            torch.device("cpu"),
        )
        for step in steps
    ]


def _logits(stages: Sequence[StageExecutor]) -> torch.Tensor:
    finishing = next(stage for stage in stages if stage.has_head)
    found = []
    for layout in _layouts(finishing.bound.dtype):
        hidden = torch.arange(layout.tokens) % VOCABULARY
        for stage in stages:
            hidden = stage.forward(hidden, layout)
            assert hidden.dtype == stage.bound.dtype  # as rows travel between stages
        found.append(finishing.finish(hidden))
    return torch.cat(found)


@pytest.mark.parametrize("kind", CONFIGS)
def test_any_cut_gives_the_same_bits(kind: str) -> None:
    spec, region, _ = _loaded(kind)
    whole = _logits(_stages(spec, region, (0, LAYERS)))
    assert torch.isfinite(whole).all()
    for cuts in ((0, 1, LAYERS), (0, 2, 3, LAYERS), (0, 1, 2, 3, LAYERS)):
        assert torch.equal(whole, _logits(_stages(spec, region, cuts)))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_stage_runs_parts_of_its_layers_with_the_same_bits(kind: str) -> None:
    spec, region, _ = _loaded(kind)
    (stage,) = _stages(spec, region, (0, LAYERS))
    for cuts in ((0, 1, LAYERS), (0, 2, 3, LAYERS)):
        for layout in _layouts(stage.bound.dtype):
            ids = torch.arange(layout.tokens) % VOCABULARY
            whole = stage.finish(stage.forward(ids, layout))
            hidden = ids
            for part in pairwise(cuts):
                hidden = stage.forward(hidden, layout, part)
            assert torch.equal(whole, stage.finish(hidden))


@pytest.mark.parametrize("kind", CONFIGS)
def test_its_image_holds_the_checkpoints_tensors(kind: str, tmp_path: Path) -> None:
    write_decoder(kind, tmp_path / "model")
    packed = pack_to_folder(tmp_path / "model", tmp_path / "out")
    with (
        safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as source,
        safe_open(packed.path / IMAGE_FILE, framework="pt") as image,
    ):
        assert set(image.keys()) == set(source.keys())
        for name in source.keys():  # noqa: SIM118 (not a mapping)
            assert torch.equal(image.get_tensor(name), source.get_tensor(name))
    assert packed.manifest.num_layers == LAYERS


@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe", "deepseek-v3", "granitemoe", "gpt-oss"])
def test_experts_are_views_of_the_image(kind: str) -> None:
    spec, region, _ = _loaded(kind)
    bound = bind(spec, region)
    assert not bound.model._copies  # type: ignore[attr-defined]
    for parameter in bound.model.layers._base.parameters():  # type: ignore[attr-defined]
        end = parameter.data_ptr() + parameter.nbytes
        assert region.pointer <= parameter.data_ptr() < end <= region.pointer + region.nbytes


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_checked_without_its_bytes(kind: str) -> None:
    spec, _, _ = _loaded(kind)
    factory = TorchEngineFactory()
    factory.check(spec)
    lost = spec.manifest.tensors[len(spec.manifest.tensors) // 2]
    fewer = tuple(tensor for tensor in spec.manifest.tensors if tensor is not lost)
    with pytest.raises(UnsupportedModel, match="lacks"):
        factory.check(replace(spec, manifest=replace(spec.manifest, tensors=fewer)))


@pytest.mark.parametrize("kind", ["mixtral", "gemma2"])
def test_sizes_that_the_config_does_not_imply_are_refused(kind: str) -> None:
    spec, _, _ = _loaded(kind)
    with pytest.raises(UnsupportedModel, match=r"config\.json implies"):
        TorchEngineFactory().check(replace(spec, config={**spec.config, "intermediate_size": 200}))


def test_a_config_names_no_code_and_no_limitless_counts() -> None:
    spec, region, _ = _loaded("mixtral")
    hooks = {"auto_map": {"AutoModelForCausalLM": "evil--model.Evil"}, "attn_implementation": "evil/kernel"}
    hooks |= {"experts_implementation": "evil/experts", "_attn_implementation_internal": "evil/kernel"}
    bound = bind(replace(spec, config={**spec.config, **hooks}), region)
    config = bound.model.layers.model.config  # type: ignore[attr-defined]
    assert "evil" not in repr(config.to_dict()) and config._attn_implementation == ATTENTION
    for key in ("num_hidden_layers", "num_local_experts", "num_attention_heads"):
        with pytest.raises(UnsupportedModel, match=f"{key} is 1000000, over the limit"):
            bind(replace(spec, config={**spec.config, key: 10**6}), region)
    nested = {**spec.config, "text_config": {"num_hidden_layers": 10**6}}
    with pytest.raises(UnsupportedModel, match="num_hidden_layers is 1000000"):
        bind(replace(spec, config=nested), region)


def test_a_model_without_attention_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    raw = {**config.to_dict(), "architectures": ["MambaForCausalLM"]}
    spec, region, _ = _loaded("llama")
    mamba = replace(spec, config=raw, manifest=replace(spec.manifest, architecture="MambaForCausalLM"))
    with pytest.raises(UnsupportedModel, match="layers of the kind linear_attention are not supported"):
        bind(mamba, region)
