"""The architectures: the task of each, and the tensors of encoders; decoders need no table."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from registry.errors import CheckpointError
from registry.images.layer_tensors import (
    Config,
    LayerTensors,
    bert_parts,
    clip_parts,
    count,
    distilbert_parts,
    mpnet_parts,
    resnet_parts,
    section,
    vit_parts,
)
from registry.images.order import HEAD_NAMES, decoder_parts
from registry.images.safetensors_file import load_json_object
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_CONTEXT = 1 << 31
_STRETCHING = ("longrope", "dynamic")
_PHI3_STRETCHING = ("su", "yarn")  # older names of longrope in Phi-3
_PHI3_ORIGINAL = 4096  # the default of a Phi-3 config


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One row of the table, or a decoder (`parts` is None).

    `prefixes` are the prefixes that the base model's names may have, most likely first; `anchor` is a name
    (without prefix) that every checkpoint has, by which its prefix is detected. `ignored` matches names that
    are known and not needed: leftovers of older versions and heads of other tasks.
    """

    name: str
    model_type: str
    task: FunctionTask
    parts: Callable[[Config, str], list[LayerTensors]] | None = None
    prefixes: tuple[str, ...] = ()
    anchor: str = ""
    context_key: str | None = None
    context_default: int = 0
    aliases: tuple[str, ...] = ()
    context_section: str | None = None
    positions_before_first: Callable[[Config], int] | None = None
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    is_foreign: bool = False  # the native engine does not run it: tensors of any names and dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A checkpoint's tensors in the order of execution.

    `head_to_compare` names a head that the config ties to `embedding` though the file has it: it is dropped
    if it equals the embedding (see `without_head`), else the head is not tied after all.
    """

    architecture: Architecture
    parts: tuple[LayerTensors, ...]
    dropped: tuple[str, ...]
    tied_head: bool
    embedding: str
    head_to_compare: str | None = None

    @property
    def num_layers(self) -> int:
        return sum(part.kind == "layer" for part in self.parts)

    def without_head(self) -> "Arrangement":
        """Return the arrangement with the duplicate head dropped."""
        name = self.head_to_compare
        parts = tuple(replace(part, names=tuple(n for n in part.names if n != name)) for part in self.parts)
        dropped = (*self.dropped, *((name,) if name else ()))
        return replace(self, parts=parts, dropped=dropped, tied_head=True, head_to_compare=None)


_BERT_HEADS = r"cls\.|classifier\.|qa_outputs\.|lm_head\.|pre_classifier\.|vocab_\w+\."
_TASK_HEADS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
_POSITION_IDS = r"(\w+\.)?embeddings\.(position|token_type)_ids$"


def _bert(
    base: str,
    model_type: str,
    prefix: str,
    parts: Callable[[Config, str], list[LayerTensors]],
    offset: Callable[[Config], int] | None = None,
) -> Architecture:
    stem = base.removesuffix("Model")
    return Architecture(
        name=base,
        model_type=model_type,
        task=FunctionTask.EMBED,
        parts=parts,
        prefixes=("", f"{prefix}."),
        anchor="embeddings.word_embeddings.weight",
        aliases=tuple(stem + head for head in ("ForPreTraining", "ForMaskedLM", *_TASK_HEADS)),
        context_key="max_position_embeddings",
        context_default=512,
        positions_before_first=offset,
        ignored=re.compile(f"{_POSITION_IDS}|{_BERT_HEADS}"),
    )


def _after_padding(config: Config) -> int:
    """Return the first position of RoBERTa, which follows the padding token's own."""
    pad = config.get("pad_token_id", 1)
    return pad + 1 if type(pad) is int and 0 <= pad < 1 << 20 else 2


TABLE: tuple[Architecture, ...] = (
    _bert("BertModel", "bert", "bert", bert_parts),
    _bert("RobertaModel", "roberta", "roberta", bert_parts, _after_padding),
    _bert("XLMRobertaModel", "xlm-roberta", "roberta", bert_parts, _after_padding),
    _bert("MPNetModel", "mpnet", "mpnet", mpnet_parts, _after_padding),
    _bert("DistilBertModel", "distilbert", "distilbert", distilbert_parts),
    Architecture(
        name="ViTForImageClassification",
        model_type="vit",
        task=FunctionTask.CLASSIFY,
        parts=vit_parts,
        prefixes=("vit.",),
        anchor="embeddings.cls_token",
        ignored=re.compile(r"vit\.(pooler\.|embeddings\.mask_token$)"),
    ),
    Architecture(
        name="ResNetForImageClassification",
        model_type="resnet",
        task=FunctionTask.CLASSIFY,
        parts=resnet_parts,
        prefixes=("resnet.",),
        anchor="embedder.embedder.convolution.weight",
    ),
    Architecture(
        name="CLIPModel",
        model_type="clip",
        task=FunctionTask.FEATURES,
        parts=clip_parts,
        prefixes=("",),
        anchor="text_model.embeddings.token_embedding.weight",
        context_key="max_position_embeddings",
        context_default=77,
        context_section="text_config",
        ignored=re.compile(r"(text|vision)_model\.embeddings\.position_ids$"),
    ),
)

_OTHER_ENGINE = "; or deploy it with --engine vllm"
_ANY_NAME = re.compile(r"[A-Za-z0-9_]{1,128}")
_DECODER = re.compile(r"[A-Za-z0-9_]{1,80}(ForCausalLM|LMHeadModel)")
# Older checkpoints without the name of their architecture, and one that is published without its head.
_UNNAMED_DECODERS = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_BARE_DECODERS = {"GPT2Model": "GPT2LMHeadModel"}
_TIED_BY_DEFAULT = ("gpt2",)
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_CONTEXT_DEFAULT = 2048
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LEFTOVERS = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.(attn|attention)\.(masked_)?bias$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings)\.weight$")

_BY_NAME = {name: row for row in TABLE for name in (row.name, *row.aliases)}
_BY_MODEL_TYPE = {row.model_type: row for row in TABLE}


def read_config(folder: Path) -> dict[str, object]:
    """Return the parsed config.json of a checkpoint folder. Raises CheckpointError."""
    return load_json_object(folder / "config.json", MAX_CONFIG_BYTES)


def architecture_of(config: Config, engine: EngineKind = EngineKind.NATIVE) -> Architecture:
    """Return the row for a config.json, by `model_type` if it has no architecture. Raises CheckpointError.

    For another engine than the native one that is any architecture, quantized or not.
    """
    names = config.get("architectures")
    model_type = config.get("model_type")
    first = names[0] if isinstance(names, list) and names else None
    row = None
    if first is None and isinstance(model_type, str):
        row = _BY_MODEL_TYPE.get(model_type) or _decoder(_UNNAMED_DECODERS.get(model_type, ""), model_type)
    elif isinstance(first, str):
        row = _BY_NAME.get(first) or _decoder(_BARE_DECODERS.get(first, first), model_type)
    quantized = config.get("quantization_config") is not None
    if engine is not EngineKind.NATIVE and (row is None or quantized):
        return _foreign(first, model_type)
    if row is None:
        raise CheckpointError(
            f"unsupported architecture {first or model_type!r}: use a decoder (…ForCausalLM), or one of "
            + ", ".join(sorted(row.name for row in TABLE))
            + _OTHER_ENGINE
        )
    if quantized:
        raise CheckpointError(
            f"quantized checkpoints are not supported: save the model in bfloat16 instead{_OTHER_ENGINE}"
        )
    return row


def _foreign(name: object, model_type: object) -> Architecture:
    """Return the row of a model that another engine runs. Raises CheckpointError."""
    if not isinstance(name, str) or not _ANY_NAME.fullmatch(name):
        raise CheckpointError("config.json names no architecture")
    kind = model_type if isinstance(model_type, str) else ""
    return Architecture(name=name, model_type=kind, task=FunctionTask.GENERATE, is_foreign=True)


def _decoder(name: str, model_type: object) -> Architecture | None:
    """Return the architecture of a decoder of that name, None unless it is one by its name."""
    if not _DECODER.fullmatch(name):
        return None
    unnamed = next((kind for kind, known in _UNNAMED_DECODERS.items() if known == name), "")
    kind = model_type if isinstance(model_type, str) else unnamed
    return Architecture(name=name, model_type=kind, task=FunctionTask.GENERATE)


def dropped_head(config: Config) -> str | None:
    """Return the checkpoint's own architecture if images leave its head out, so that it loses its task.

    A language model's head is not counted: such encoders are published to be used without it.
    """
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) and first.endswith(_TASK_HEADS) else None


def task_of(config: Config, engine: EngineKind = EngineKind.NATIVE) -> FunctionTask:
    """Return the task of a function of this model."""
    return architecture_of(config, engine).task


def context_length_of(config: Config, engine: EngineKind = EngineKind.NATIVE) -> int:
    """Return the longest usable context in tokens, 0 for models that read no text."""
    row = architecture_of(config, engine)
    if row.parts is not None and row.context_key is None:
        return 0
    source = section(config, row.context_section) if row.context_section else config
    if row.is_foreign and isinstance(text := config.get("text_config"), dict):
        source = text
    key = row.context_key or next((key for key in _CONTEXT_KEYS if key in source), _CONTEXT_KEYS[0])
    positions = source.get(key, row.context_default or _CONTEXT_DEFAULT)
    if type(positions) is not int or not 0 < positions <= MAX_CONTEXT:
        raise CheckpointError(f"config.json: {key} must be a positive integer, not {positions!r}")
    longest = min(positions, _stretched_from(config, row) or positions)
    return max(1, longest - (row.positions_before_first(config) if row.positions_before_first else 0))


def _stretched_from(config: Config, row: Architecture) -> int | None:
    """Return the length beyond which a model's rotary embedding rotates all positions anew, None for none.

    Cached keys cannot follow that, so the engine goes no further.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    phi3 = row.model_type == "phi3"
    kinds = (*_STRETCHING, *_PHI3_STRETCHING) if phi3 else _STRETCHING
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in kinds:
        return None
    key = "original_max_position_embeddings"
    default = _PHI3_ORIGINAL if phi3 else None
    for given in (config.get(key, default), rope.get(key)):
        if type(given) is int and given > 0:
            return given
    return None


def arrange(config: Config, names: Collection[str], engine: EngineKind = EngineKind.NATIVE) -> Arrangement:
    """Sort a checkpoint's tensors into the parts of its architecture.

    Raises CheckpointError for a missing or an unknown tensor.
    """
    row = architecture_of(config, engine)
    if row.parts is None:
        return _arrange_decoder(row, config, names)
    prefix = next((prefix for prefix in row.prefixes if prefix + row.anchor in names), None)
    if prefix is None:
        raise CheckpointError(f"{row.name}: tensor {row.prefixes[0] + row.anchor!r} is missing")
    expected = row.parts(config, prefix)
    layers = sum(part.kind == "layer" for part in expected)
    parts = tuple(_present(part, names, layers, row.name) for part in expected)
    used = {name for part in parts for name in part.names}
    dropped = sorted(name for name in names if name not in used and row.ignored.match(name))
    _check_nothing_left(row, prefix, layers, set(names) - used - set(dropped))
    return Arrangement(
        architecture=row,
        parts=parts,
        dropped=tuple(dropped),
        tied_head=False,
        embedding=prefix + row.anchor,
    )


def _arrange_decoder(row: Architecture, config: Config, names: Collection[str]) -> Arrangement:
    dropped = [] if row.is_foreign else sorted(name for name in names if _LEFTOVERS.search(name))
    parts = decoder_parts(row.name, set(names) - set(dropped))
    found = sum(part.kind == "layer" for part in parts)
    key = next((key for key in _LAYER_KEYS if key in config), _LAYER_KEYS[0])
    wanted = count(config, key, found)
    if found < wanted and not row.is_foreign:
        raise CheckpointError(f"{row.name}: layer {found} of {wanted} has no tensors")
    head = next((name for name in HEAD_NAMES if name in names), None)
    embedding = next((name for name in parts[0].names if _EMBEDDING.search(name)), "")
    tied = bool(config.get("tie_word_embeddings", row.model_type in _TIED_BY_DEFAULT)) and not row.is_foreign
    return Arrangement(
        architecture=row,
        parts=parts,
        dropped=tuple(dropped),
        tied_head=head is None,
        embedding=embedding,
        head_to_compare=head if tied and embedding else None,
    )


def _present(part: LayerTensors, names: Collection[str], layers: int, row: str) -> LayerTensors:
    """Return the part with the names that the checkpoint has. Raises CheckpointError for a missing one."""
    found: list[str] = []
    missing: list[str] = []
    for name in part.names:
        bare = name.removesuffix("?")
        if (actual := _spelling(bare, names)) is not None:
            found.append(actual)
        elif bare == name:
            missing.append(name)
    if missing and not found and part.kind == "layer":
        place = f" of {part.tower}" if part.tower else f" of {layers}"
        raise CheckpointError(f"{row}: layer {part.index}{place} has no tensors (for example {missing[0]!r})")
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{row}: tensor {missing[0]!r} is missing{more}")
    return replace(part, names=tuple(found))


_OLD_NORM_NAMES = {".weight": ".gamma", ".bias": ".beta"}


def _spelling(name: str, names: Collection[str]) -> str | None:
    """Return the name as the checkpoint spells it: old BERT files have LayerNorm.gamma and LayerNorm.beta."""
    if name in names:
        return name
    stem, dot, kind = name.rpartition(".")
    if stem.endswith("LayerNorm") and (old := stem + _OLD_NORM_NAMES[dot + kind]) in names:
        return old
    return None


def _check_nothing_left(row: Architecture, prefix: str, layers: int, left: Iterable[str]) -> None:
    unknown = sorted(left)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointError(
            f"{row.name}: tensor {unknown[0]!r}{more} is not part of this model as config.json describes it "
            f"({layers} layers, names starting with {prefix!r})"
        )
