"""Every architecture of the table, with checkpoints that transformers itself has saved."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors import safe_open

from registry.errors import CheckpointError
from registry.images.architectures import TABLE, architecture_of, context_length_of, read_config, task_of
from registry.images.manifest import UNIT_BYTES, Manifest
from registry.images.pack import PackPlan, hash_image, plan_checkpoint
from registry.images.plan import image_chunks
from registry.images.verify import check_units
from registry.records.function import FunctionTask
from tests.fixtures.images import llama_config, llama_tensors, write_checkpoint

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 64, "max_position_embeddings": 64}
DECODER = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 8}
GPT2 = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
RESNET = {"embedding_size": 8, "num_labels": 5}
DISTILBERT = {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}

Build = Callable[[], hf.PreTrainedModel]
MODELS: dict[str, Build] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "llama-tied-biased": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**DECODER, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER)),
    "qwen3-tied": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**DECODER)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **TOKENS)),
    "gpt2-no-prefix": lambda: hf.GPT2Model(hf.GPT2Config(**GPT2, **TOKENS)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**TEXT)),
    "bert-no-pooler": lambda: hf.BertModel(hf.BertConfig(**TEXT), add_pooling_layer=False),
    "bert-masked-lm": lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),
    "bert-sequence": lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT)),
    "xlm-roberta": lambda: hf.XLMRobertaForMaskedLM(hf.XLMRobertaConfig(**TEXT)),
    "mpnet": lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)),
    "distilbert": lambda: hf.DistilBertForMaskedLM(hf.DistilBertConfig(**DISTILBERT)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, num_labels=5)),
    "vit-no-bias": lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, qkv_bias=False)),
    "resnet-basic": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(**RESNET, hidden_sizes=[8, 16], depths=[2, 1], layer_type="basic")
    ),
    "resnet-bottleneck": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(**RESNET, hidden_sizes=[16, 32], depths=[1, 2])
    ),
    "clip": lambda: hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**TEXT, **TOKENS, "projection_dim": 16},
            vision_config={**IMAGE, "num_hidden_layers": 3, "projection_dim": 16},
            projection_dim=16,
        )
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            torch.manual_seed(0)
            folders[name] = tmp_path_factory.mktemp(name)
            MODELS[name]().save_pretrained(folders[name])
        return folders[name]

    return save


def read_image(plan: PackPlan) -> tuple[Manifest, memoryview]:
    image = memoryview(bytearray(plan.nbytes))
    plan.read_into(0, image)
    return hash_image(plan), image


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_packs_and_reads_back(saved: Callable[[str], Path], name: str) -> None:
    folder = saved(name)
    plan = plan_checkpoint(folder)
    manifest, image = read_image(plan)
    assert check_units(manifest, 0, image) == []
    assert manifest.unit_count == -(-manifest.nbytes // UNIT_BYTES)
    entries = {entry.name: entry for entry in manifest.tensors}
    with safe_open(folder / "model.safetensors", "np") as file:
        assert set(entries) | set(plan.dropped) == set(file.keys())
        for tensor, entry in entries.items():
            expected = file.get_tensor(tensor)
            raw = image[entry.offset : entry.offset + entry.nbytes]
            assert np.array_equal(np.frombuffer(raw, expected.dtype).reshape(entry.shape), expected)


def test_every_row_of_the_table_is_tried() -> None:
    tried = {architecture_of({"architectures": [type(build()).__name__]}).name for build in MODELS.values()}
    assert tried >= {row.name for row in TABLE}


@pytest.mark.parametrize(
    ("name", "task", "context", "tied", "spans"),
    [
        ("llama", FunctionTask.GENERATE, 64, False, "embed layer0 layer1 head"),
        ("llama-tied-biased", FunctionTask.GENERATE, 64, True, "embed layer0 layer1 head"),
        ("gpt2-no-prefix", FunctionTask.GENERATE, 64, True, "embed layer0 layer1 head"),
        ("bert-masked-lm", FunctionTask.EMBED, 64, False, "embed layer0 layer1 head"),
        ("roberta", FunctionTask.EMBED, 62, False, "embed layer0 layer1 head"),
        ("distilbert", FunctionTask.EMBED, 512, False, "embed layer0 layer1 head"),
        ("vit", FunctionTask.CLASSIFY, 0, False, "embed layer0 layer1 head"),
        (
            "resnet-basic",
            FunctionTask.CLASSIFY,
            0,
            False,
            "embed stage0.layer0 stage0.layer1 stage1.layer0 head",
        ),
        (
            "clip",
            FunctionTask.FEATURES,
            64,
            False,
            "text.embed text.layer0 text.layer1 text.head "
            "vision.embed vision.layer0 vision.layer1 vision.layer2 vision.head",
        ),
    ],
)
def test_the_table_row_of_a_model(
    saved: Callable[[str], Path], name: str, task: FunctionTask, context: int, tied: bool, spans: str
) -> None:
    plan = plan_checkpoint(saved(name))
    assert (task_of(plan.config), context_length_of(plan.config), plan.tied_head) == (task, context, tied)
    assert plan.dtype == "float32"
    found = [
        f"{span.tower}{'.' if span.tower else ''}{span.kind}{span.index if span.kind == 'layer' else ''}"
        for span in plan.layout.layers
    ]
    assert " ".join(found) == spans
    assert plan.num_layers == spans.count("layer")


def test_sharded_by_transformers_is_the_same_image(tmp_path: Path, saved: Callable[[str], Path]) -> None:
    torch.manual_seed(0)
    MODELS["llama"]().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert hash_image(plan_checkpoint(tmp_path)) == hash_image(plan_checkpoint(saved("llama")))


def test_bfloat16_is_what_torch_makes_of_it(saved: Callable[[str], Path]) -> None:
    folder = saved("llama")
    manifest, image = read_image(plan_checkpoint(folder, "bfloat16"))
    with safe_open(folder / "model.safetensors", "pt") as file:
        for entry in manifest.tensors:
            expected = file.get_tensor(entry.name).to(torch.bfloat16).view(torch.int16).numpy()
            raw = image[entry.offset : entry.offset + entry.nbytes]
            assert np.array_equal(np.frombuffer(raw, np.int16).reshape(entry.shape), expected)


# --- rules, on synthetic checkpoints --------------------------------------------------------------


def test_a_doubled_head_is_stored_once(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    config = llama_config(tie_word_embeddings=True)
    doubled = plan_checkpoint(write_checkpoint(tmp_path / "doubled", tensors, config, shards=2))
    del tensors["lm_head.weight"]
    single = plan_checkpoint(write_checkpoint(tmp_path / "single", tensors, config))
    assert doubled.tied_head and single.tied_head
    assert doubled.dropped == ("lm_head.weight",)
    assert hash_image(doubled) == hash_image(single)


def test_a_head_that_differs_is_not_tied_whatever_the_config_says(tmp_path: Path) -> None:
    plan = plan_checkpoint(
        write_checkpoint(tmp_path, llama_tensors(), llama_config(tie_word_embeddings=True))
    )
    assert not plan.tied_head
    assert plan.layout.tensors[-1].name == "lm_head.weight"


def test_a_missing_head_is_tied(tmp_path: Path) -> None:
    plan = plan_checkpoint(write_checkpoint(tmp_path, llama_tensors(head=False), llama_config()))
    assert plan.tied_head


def test_leftovers_are_dropped(tmp_path: Path) -> None:
    leftover = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = {**llama_tensors(), leftover: np.zeros(4, dtype="<f4")}
    assert plan_checkpoint(write_checkpoint(tmp_path, tensors, llama_config())).dropped == (leftover,)


def test_old_norm_names_are_known(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = saved("bert")
    with safe_open(folder / "model.safetensors", "np") as file:
        tensors = {
            re.sub(r"weight$", "gamma", name).replace(".bias", ".beta") if "LayerNorm" in name else name: (
                file.get_tensor(name)
            )
            for name in file.keys()  # noqa: SIM118 (not a mapping)
        }
    old = plan_checkpoint(write_checkpoint(tmp_path, tensors, read_config(folder)))
    new = plan_checkpoint(folder)
    assert old.nbytes == new.nbytes
    found = [b"".join(bytes(view) for view in image_chunks(plan, len(plan.header))) for plan in (old, new)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (r"model\.layers\.1\.", "layer 1 of 2 has no tensors"),
        (r"model\.layers\.0\.", r"layer 0 of 2 has no tensors, for example 'model\.layers\.0\.…'"),
        (r"model\.layers\.", "no tensor has the index of a layer in its name"),
    ],
)
def test_a_missing_layer_is_named(tmp_path: Path, removed: str, message: str) -> None:
    tensors = {name: array for name, array in llama_tensors().items() if not re.match(removed, name)}
    with pytest.raises(CheckpointError, match=f"LlamaForCausalLM: .*{message}"):
        plan_checkpoint(write_checkpoint(tmp_path, tensors, llama_config()))


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (r"bert\.encoder\.layer\.1\.", "layer 1 of 2 has no tensors"),
        (r".*layer\.0\.attention\.self\.key\.bias", r"'.*layer\.0\.attention\.self\.key\.bias' is missing"),
        (r".*word_embeddings", r"'.*embeddings\.word_embeddings\.weight' is missing"),
    ],
)
def test_a_missing_tensor_of_an_encoder_is_named(
    saved: Callable[[str], Path], tmp_path: Path, removed: str, message: str
) -> None:
    tensors, config = _bert(saved)
    left = {name: array for name, array in tensors.items() if not re.match(removed, name)}
    with pytest.raises(CheckpointError, match=f"BertModel: .*{message}"):
        plan_checkpoint(write_checkpoint(tmp_path, left, config))


@pytest.mark.parametrize("extra", ["bert.encoder.layer.2.output.dense.bias", "bert.score.weight"])
def test_an_unknown_tensor_of_an_encoder_is_named(
    saved: Callable[[str], Path], tmp_path: Path, extra: str
) -> None:
    tensors, config = _bert(saved)
    tensors[extra] = np.zeros(4, dtype="<f4")
    with pytest.raises(CheckpointError, match=f"'{re.escape(extra)}' is not part of this model"):
        plan_checkpoint(write_checkpoint(tmp_path, tensors, config))


def _bert(saved: Callable[[str], Path]) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    folder = saved("bert-masked-lm")
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, read_config(folder)  # noqa: SIM118


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["T5ForConditionalGeneration"]},
            "unsupported architecture 'T5For.*': use a decoder .*BertModel.*CLIPModel",
        ),
        ({"architectures": [7]}, "unsupported architecture 7"),
        ({"architectures": None, "model_type": "t5"}, "unsupported architecture 't5'"),
        ({"architectures": None, "model_type": None}, "unsupported architecture None"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan_checkpoint(write_checkpoint(tmp_path, llama_tensors(), llama_config(**changes)))


def test_the_model_type_stands_in_for_a_missing_architecture(tmp_path: Path) -> None:
    plan = plan_checkpoint(write_checkpoint(tmp_path, llama_tensors(), llama_config(architectures=None)))
    assert plan.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("config", ["", "[]", "{", '{"a": 1, "a": 2}', "\x00"])
def test_a_broken_config_is_refused(tmp_path: Path, config: str) -> None:
    write_checkpoint(tmp_path, llama_tensors(), {})
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan_checkpoint(tmp_path)


def test_context_length_defaults_and_bounds() -> None:
    config = llama_config()
    assert context_length_of(config) == 128
    del config["max_position_embeddings"]
    assert context_length_of(config) == 2048
    assert context_length_of({"model_type": "gpt2", "n_positions": 99}) == 99
    assert context_length_of({"model_type": "clip", "text_config": {"max_position_embeddings": 77}}) == 77
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        context_length_of(llama_config(max_position_embeddings=-5))
    with pytest.raises(CheckpointError, match="text_config"):
        context_length_of({"model_type": "clip", "text_config": [1]})
