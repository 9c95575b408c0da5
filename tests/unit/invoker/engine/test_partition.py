"""Weights are views of the image, and any cut into stages gives the same bits as the whole model."""

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.engine.contract import ModelSpec, OutOfKvCache, UnsupportedModel
from invoker.engine.decoder_models import decoder_config, longest_of
from invoker.engine.fused_weights import FusedStage
from invoker.engine.kv.cache import KvPool, KvShape
from invoker.engine.layout import StepLayout, build_layout, group_by_length
from invoker.engine.paths import LayerPath
from invoker.engine.scheduling.scheduler import Chunk
from invoker.engine.stage import StageExecutor
from invoker.engine.weights import BoundStage, bind
from tests.fixtures.checkpoints import LAYERS, VOCABULARY
from tests.fixtures.engine import KINDS_AND_PATHS, MemoryRegion, cached_image

PAGES = 24


def _tensors(bound: BoundStage) -> Iterator[torch.Tensor]:
    if isinstance(bound.model, FusedStage):
        for layer in bound.model.layers._layers:
            values = (getattr(layer, each.name) for each in fields(layer))
            yield from (value for value in values if isinstance(value, torch.Tensor))
        ends = (bound.model.embedding, bound.model.norm, bound.model.head)
        yield from (tensor for tensor in ends if tensor is not None)
    else:
        layers = bound.model.layers  # type: ignore[attr-defined]
        yield from (*layers._base.parameters(), *layers.model.parameters())


@pytest.mark.parametrize(("kind", "path"), KINDS_AND_PATHS)
def test_weights_are_views_of_the_region(kind: str, path: LayerPath) -> None:
    spec, region, model = cached_image(kind)
    bound = bind(spec, region, path)
    assert bound.path is path
    for tensor in _tensors(bound):
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        assert region.pointer <= tensor.data_ptr() < end <= region.pointer + region.nbytes
    total = sum(t.numel() for t in {t.data_ptr(): t for t in _tensors(bound)}.values())
    assert total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("kind", "path"), KINDS_AND_PATHS)
def test_frequencies_are_not_left_on_the_meta_device(kind: str, path: LayerPath) -> None:
    # They are in no checkpoint.
    spec, region, model = cached_image(kind)
    bound = bind(spec, region, path).model
    if isinstance(bound, FusedStage):
        assert torch.equal(bound.layers.shape.frequencies, model.model.rotary_emb.inv_freq)
    elif kind != "gpt2":
        assert torch.equal(bound.layers._base.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)  # type: ignore[attr-defined]


def test_the_fused_path_is_taken_where_it_applies(caplog: pytest.LogCaptureFixture) -> None:
    def path(kind: str, dtype: str = "float32", **config: object) -> tuple[LayerPath, str]:
        spec, region, _ = cached_image(kind, dtype)
        with caplog.at_level(logging.INFO, "invoker.engine"):
            taken = bind(_config(spec, **config), region).path
        return taken, caplog.records[-1].getMessage().split(": ", 2)[2]

    hf = LayerPath.HUGGING_FACE
    assert path("llama") == (LayerPath.FUSED, "q|k|v and gate|up are views of the image")
    assert path("gpt2") == (hf, "there are no fused modules for GPT2LMHeadModel")
    assert path("llama", hidden_act="gelu") == (hf, "the fused modules compute SiLU, not gelu")


def test_only_the_layers_of_a_stage_decide_its_path() -> None:
    spec, region, _ = cached_image("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    entries = [replace(e, offset=e.offset + 256) if e.name == name else e for e in spec.manifest.tensors]
    apart = replace(spec, manifest=replace(spec.manifest, tensors=tuple(entries)))
    paths = [bind(replace(apart, layers=(i, i + 1)), region).path for i in range(LAYERS)]
    assert paths == [LayerPath.FUSED, LayerPath.HUGGING_FACE, LayerPath.FUSED, LayerPath.FUSED]


def test_binding_leaves_the_config_alone() -> None:
    spec, region, _ = cached_image("llama3")
    before = repr(spec.config)
    bind(spec, region)
    assert repr(spec.config) == before


def _poison_all_but(spec: ModelSpec, region: MemoryRegion, first: int, last: int) -> MemoryRegion:
    """Return a copy of the image in which every byte that the stage may not need is part of a NaN."""
    manifest = spec.manifest
    clean = MemoryRegion(region.nbytes)
    clean.buffer[:] = b"\xff" * region.nbytes
    for span in manifest.layers:
        if span.kind == "layer":
            needed = first <= span.index < last
        elif span.kind == "embed":
            needed = first == 0
        else:
            needed = last == manifest.num_layers
        if needed:
            clean.buffer[span.start : span.end] = region.buffer[span.start : span.end]
    return clean


@functools.cache
def _stage(kind: str, path: LayerPath, first: int, last: int) -> StageExecutor:
    spec, region, _ = cached_image(kind)
    bound = bind(replace(spec, layers=(first, last)), _poison_all_but(spec, region, first, last), path)
    shape = KvShape(
        layers=last - first,
        heads=bound.geometry.kv_heads,
        head_dim=bound.geometry.head_dim,
        dtype=bound.dtype,
    )
    return StageExecutor(bound, KvPool(shape, torch.zeros(PAGES * shape.page_bytes, dtype=torch.uint8)))


def _run(stages: list[StageExecutor], steps: list[tuple[torch.Tensor, StepLayout]]) -> list[torch.Tensor]:
    finishing = next(stage for stage in stages if stage.has_head)
    results = []
    for ids, layout in steps:
        hidden = ids
        for stage in stages:
            hidden = stage.forward(hidden, layout)
        results.append(finishing.finish(hidden))
    return results


@st.composite
def step_sequences(draw: st.DrawFn) -> list[tuple[torch.Tensor, StepLayout]]:
    """Draw a few steps over up to three sequences, each in chunks of any length, on adjacent pages or not."""
    free = draw(st.one_of(st.just(range(PAGES)), st.permutations(range(PAGES))))
    count = draw(st.integers(1, 3))
    pages = [tuple(free[6 * i : 6 * i + 6]) for i in range(count)]
    starts = [0] * count
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        chunks = []
        for i in range(count):
            n = draw(st.sampled_from([0, 1, 1, 5, 70]))
            n = min(n, len(pages[i]) * 16 - starts[i])
            if n:
                last = draw(st.booleans())
                chunks.append(Chunk(request_id=str(i), start=starts[i], count=n, pages=pages[i], last=last))
                starts[i] += n
        if any(chunk.last for chunk in chunks):
            layout = build_layout(chunks, torch.float32, torch.device("cpu"))
            ids = torch.randint(0, VOCABULARY, (layout.tokens,), generator=generator)
            steps.append((ids, layout))
        else:
            for chunk in chunks:  # left out, so it has not been computed
                starts[int(chunk.request_id)] = chunk.start
    return steps


CUTS = st.sets(st.integers(1, LAYERS - 1)).map(lambda cuts: [0, *sorted(cuts), LAYERS])


@pytest.mark.parametrize(("kind", "path"), KINDS_AND_PATHS)
@settings(max_examples=12)
@given(cuts=CUTS, steps=step_sequences())
def test_any_partition_gives_the_same_bits(
    kind: str, path: LayerPath, cuts: list[int], steps: list[tuple[torch.Tensor, StepLayout]]
) -> None:
    whole = _run([_stage(kind, path, 0, LAYERS)], steps)
    stages = [_stage(kind, path, a, b) for a, b in pairwise(cuts)]
    parts = _run(stages, steps)
    for one, other in zip(whole, parts, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


def _chunks(pages: Sequence[tuple[int, ...]], starts: Sequence[int], count: int) -> list[Chunk]:
    return [
        Chunk(request_id=str(i), start=start, count=count, pages=own, last=True)
        for i, (own, start) in enumerate(zip(pages, starts, strict=True))
    ]


@pytest.mark.parametrize(("kind", "path"), KINDS_AND_PATHS)
def test_the_places_of_pages_change_nothing(kind: str, path: LayerPath) -> None:
    # Short ones, a page more than is worth a copy, long ones; prompts in two chunks, then decoded together.
    lengths = (1, 30, 63, 64, 90, 91)
    side_by_side = [tuple(range(7 * i, 7 * i + 7)) for i in range(6)]
    apart = [tuple(7 * i + 3 * k % 7 for k in range(7)) for i in range(6)]
    mixed = [*side_by_side[:2], apart[2], side_by_side[3], side_by_side[4], apart[5]]
    ids = torch.randint(0, VOCABULARY, (3, 6 * 91), generator=torch.Generator().manual_seed(5))
    spec, region, _ = cached_image(kind)
    bound = bind(spec, region, path)
    geometry = bound.geometry
    shape = KvShape(layers=LAYERS, heads=geometry.kv_heads, head_dim=geometry.head_dim, dtype=torch.float32)
    found = []
    for pages in (side_by_side, apart, mixed):
        stage = StageExecutor(bound, KvPool(shape, torch.zeros(42 * shape.page_bytes, dtype=torch.uint8)))
        steps = []
        for i, length in enumerate(lengths):
            for start, end in ((0, length // 2), (length // 2, length)):
                if start < end:
                    chunk = replace(_chunks(pages, lengths, 1)[i], start=start, count=end - start)
                    layout = build_layout([chunk], torch.float32, torch.device("cpu"))
                    steps.append((ids[0, 91 * i + start : 91 * i + end], layout))
        for more in range(2):
            chunks = _chunks(pages, [length + more for length in lengths], 1)
            layout = build_layout(chunks, torch.float32, torch.device("cpu"))
            steps.append((ids[1 + more, : layout.tokens], layout))
        found.append(torch.cat(_run([stage], steps)))
    assert torch.isfinite(found[0]).all()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)


def test_long_sequences_decode_over_their_keys_in_place() -> None:
    pages = [(4, 5, 6, 7, 8), (10, 11, 12, 13, 14, 15), (30, 29, 28, 27, 26, 25), (40, 41, 42, 43, 44, 45)]
    chunks = _chunks(pages, (64, 95, 95, 95), 1)
    layout = build_layout(chunks, torch.float32, torch.device("cpu"))
    first, apart, last = layout.calls(None)
    assert (first.first, first.last, first.runs) == (0, 2, ((64, 129), (160, 256)))
    assert (apart.first, apart.last, apart.runs) == (2, 3, ())
    assert apart.pages is not None and apart.pages.tolist() == list(pages[2])
    assert (last.first, last.last, last.runs) == (3, 4, ((640, 736),))
    windowed = layout.calls(70)
    assert [run for call in windowed for run in call.runs] == [(64, 129), (186, 256), (666, 736)]


@given(st.lists(st.integers(1, 300), max_size=20).map(sorted))
def test_groups_cover_all_and_pad_little(pages: list[int]) -> None:
    groups = group_by_length(pages)
    assert [i for a, b in groups for i in range(a, b)] == list(range(len(pages)))
    for a, b in groups:
        assert pages[b - 1] <= max(16, 2 * pages[a])


def _without(spec: ModelSpec, name: str) -> ModelSpec:
    tensors = tuple(e for e in spec.manifest.tensors if e.name != name)
    return replace(spec, manifest=replace(spec.manifest, tensors=tensors))


def _with_extra(spec: ModelSpec) -> ModelSpec:
    extra = replace(spec.manifest.tensors[0], name="model.layers.0.mlp.experts.weight")
    return replace(spec, manifest=replace(spec.manifest, tensors=(*spec.manifest.tensors, extra)))


def _config(spec: ModelSpec, **values: object) -> ModelSpec:
    return replace(spec, config={**spec.config, **values})


def test_what_cannot_be_bound_is_named() -> None:
    spec, region, _ = cached_image("llama")
    refused = {
        "lacks model.layers.2.mlp.up_proj.weight$": _without(spec, "model.layers.2.mlp.up_proj.weight"),
        "lacks lm_head.weight$": _without(spec, "lm_head.weight"),
        "architecture lacks: model.layers.0.mlp.experts.weight$": _with_extra(spec),
        "stored as F32, but the model runs in torch.bfloat16": replace(spec, dtype="bfloat16"),
        "dtype 'int3' is not supported": replace(spec, dtype="int3"),
        "gate_proj.weight has shape": _config(spec, intermediate_size=256),
        "lacks model.layers.4": _config(spec, num_hidden_layers=5),
        "lacks tensors|architecture lacks": _config(spec, num_hidden_layers=3),
        "quantised": _config(spec, quantization_config={"bits": 4}),
        "config.json": _config(spec, hidden_size="big"),
        "model_type llama of config.json is not one of Mamba": replace(
            spec, manifest=replace(spec.manifest, architecture="MambaForCausalLM")
        ),
        r"layers \[2, 2\)": replace(spec, layers=(2, 2)),
        r"layers \[0, 9\)": replace(spec, layers=(0, 9)),
    }
    for message, broken in refused.items():
        with pytest.raises(UnsupportedModel, match=message):
            bind(broken, region)
    with pytest.raises(UnsupportedModel, match="the region has 256 bytes"):
        bind(spec, MemoryRegion(256))


def test_a_cache_without_room_for_a_page_is_refused() -> None:
    shape = KvShape(layers=2, heads=1, head_dim=8, dtype=torch.float32)
    with pytest.raises(OutOfKvCache, match="less than one page of 2048 bytes"):
        KvPool(shape, torch.zeros(2047, dtype=torch.uint8))
    assert repr(KvPool(shape, torch.zeros(5000, dtype=torch.uint8))) == (
        "<KvPool 2 pages of 16 tokens, 2 layers>"
    )


def test_frequencies_that_depend_on_length_end_the_context() -> None:
    spec, _, _ = cached_image("phi3")
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    raw = {**spec.config, "rope_parameters": rope, "original_max_position_embeddings": 128}
    assert longest_of(decoder_config("Phi3ForCausalLM", raw)) == 128
