"""Decoders of the installed transformers without weights: their classes and configs."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from invoker.engine.attention import ATTENTION
from invoker.engine.attention_adapters import ADAPTED_ARCHITECTURES
from invoker.engine.contract import UnsupportedModel

MAX_LAYERS = 1000
_UNBOUNDED = 1 << 20  # positions of a model without a limit, as with ALiBi
_STRETCHING = ("longrope", "dynamic")
_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
# With these a config names code on a hub: remote models, attention and expert kernels.
_CODE_KEYS = frozenset({"auto_map", "attn_implementation", "experts_implementation", "use_kernels"})
_COUNTS = re.compile(r"layer|expert|head|block|group|stage|depth|codebook|stack")
_MOST = 16_384
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")

_MODEL_TYPES = {
    name: model_type
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    for name in ((names,) if isinstance(names, str) else names)
}


def is_decoder(architecture: str) -> bool:
    """Return whether the architecture generates tokens, hence needs a KV cache."""
    return architecture in _MODEL_TYPES


def parse_config(config_class: type[PreTrainedConfig], raw: Mapping[str, object]) -> Any:
    """Return a private config object from a parsed config.json. Raises UnsupportedModel."""
    if raw.get("quantization_config") is not None:
        raise UnsupportedModel("quantised checkpoints are not supported")
    try:
        config = config_class.from_dict(_harmless(raw))
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UnsupportedModel(f"config.json: {error}") from error
    if getattr(config, "add_cross_attention", False) or config.is_encoder_decoder:
        raise UnsupportedModel("models with cross-attention are not supported")
    return config


def _harmless(given: Mapping[str, object]) -> dict[str, Any]:
    """Return a deep copy without what makes transformers load code, or build very many modules.

    A copy, as configs are shared by reference and their classes rewrite nested dicts in place. Raises
    UnsupportedModel for a count that no model has.
    """
    kept: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key)
        if name.startswith("_") or name in _CODE_KEYS:
            continue
        if type(value) is int and value > _MOST and _COUNTS.search(name):
            raise UnsupportedModel(f"config.json: {key} is {value}, over the limit of {_MOST}")
        kept[key] = _harmless(value) if isinstance(value, Mapping) else copy.deepcopy(value)
    return kept


def decoder_config(architecture: str, raw: Mapping[str, object]) -> Any:
    """Return the config of a decoder from a parsed config.json. Raises UnsupportedModel."""
    model_type = raw.get("model_type") or _MODEL_TYPES.get(architecture)
    if not is_decoder(architecture) or not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(f"{architecture} is not a decoder of the installed transformers")
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    if architecture not in ((own,) if isinstance(own, str) else own):
        raise UnsupportedModel(f"the model_type {model_type} of config.json is not one of {architecture}")
    config = parse_config(CONFIG_MAPPING[model_type], raw)
    if not 0 < config.num_hidden_layers <= MAX_LAYERS:
        raise UnsupportedModel(f"a decoder has 1 to {MAX_LAYERS} layers, not {config.num_hidden_layers}")
    if kinds := set(getattr(config, "layer_types", None) or ()) - _ATTENTION_KINDS:
        raise UnsupportedModel(f"layers of the kind {', '.join(sorted(kinds))} are not supported")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("attention to later tokens is not supported")
    for name in _OUTPUTS:
        setattr(config, name, False)
    config.return_dict = True
    return config


def model_without_weights(architecture: str, config: Any) -> PreTrainedModel:
    """Return the model on the meta device, with attention over the KV cache. Raises UnsupportedModel.

    It is built in float32, whatever its weights will be: transformers sets the dtype of the whole process
    while it builds a model.
    """
    own = architecture in ADAPTED_ARCHITECTURES
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation="eager" if own else ATTENTION,
                trust_remote_code=False,
            )
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise UnsupportedModel(f"{architecture} cannot be built from config.json: {error}") from error
    model.config._attn_implementation = ATTENTION  # no masks are made for it
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def window_of(config: Any, layer: int) -> int | None:
    """Return the attention window of a layer in tokens, None for unlimited."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window is None or (kinds is not None and kinds[layer] != "sliding_attention"):
        return None
    assert isinstance(window, int)
    return window


def longest_of(config: Any) -> int:
    """Return the number of positions that a model can distinguish."""
    longest = getattr(config, "max_position_embeddings", None) or _UNBOUNDED
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in _STRETCHING:
        # Beyond this length these change the frequencies of *all* positions, which cached keys cannot follow.
        original = getattr(config, "original_max_position_embeddings", None)
        longest = min(longest, original or rope.get("original_max_position_embeddings") or longest)
    assert isinstance(longest, int)
    return longest
