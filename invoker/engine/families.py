"""The decoder families: the Hugging Face classes of their layers, and their tensor names."""

import copy
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import (
    MistralDecoderLayer,
    MistralRMSNorm,
    MistralRotaryEmbedding,
)
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3RMSNorm, Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from invoker.engine.contract import UnsupportedModel
from invoker.engine.kv.cache import KvShape


@dataclass(frozen=True, slots=True)
class Family:
    """Classes and tensor names of one architecture.

    `rotary` is None where positions are a learned embedding, named `positions`. `prefix` precedes every name
    but the head's; a checkpoint of the bare base model lacks it.
    """

    config: type[PreTrainedConfig]
    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module] | None = None
    _: KW_ONLY
    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str = ""
    layers: str = "layers"
    final_norm: str = "norm"
    head: str = "lm_head"
    norm_eps: str = "rms_norm_eps"
    windows: Literal["none", "all", "typed"] = "none"

    def window(self, config: Any, layer: int) -> int | None:
        """Return the attention window of the layer in tokens, None for unlimited."""
        if self.windows == "none":
            return None
        if self.windows == "typed" and config.layer_types[layer] != "sliding_attention":
            return None
        window = config.sliding_window
        assert window is None or isinstance(window, int)
        return window


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "Qwen2ForCausalLM": Family(
        Qwen2Config, Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding, windows="typed"
    ),
    "Qwen3ForCausalLM": Family(
        Qwen3Config, Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding, windows="typed"
    ),
    "MistralForCausalLM": Family(
        MistralConfig, MistralDecoderLayer, MistralRMSNorm, MistralRotaryEmbedding, windows="all"
    ),
    "Phi3ForCausalLM": Family(Phi3Config, Phi3DecoderLayer, Phi3RMSNorm, Phi3RotaryEmbedding, windows="all"),
    "GPT2LMHeadModel": Family(
        GPT2Config,
        GPT2Block,
        nn.LayerNorm,
        prefix="transformer.",
        embedding="wte",
        positions="wpe",
        layers="h",
        final_norm="ln_f",
        norm_eps="layer_norm_epsilon",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes of a decoder that memory planning needs."""

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    longest: int  # positions that the model can distinguish

    def kv_shape(self, layers: int, dtype: torch.dtype) -> KvShape:
        """Return the shape of K and V in `layers` layers."""
        return KvShape(layers=layers, heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype)


def family_of(architecture: str) -> Family:
    """Return the family of an architecture. Raises UnsupportedModel."""
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"{architecture} is not a decoder that this engine runs; it runs {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]


def parse_config(config_class: type[PreTrainedConfig], raw: Mapping[str, object]) -> Any:
    """Return a private config object from a parsed config.json. Raises UnsupportedModel."""
    if raw.get("quantization_config") is not None:
        raise UnsupportedModel("quantised checkpoints are not supported")
    try:
        # Copied deeply: configs are shared by reference and their classes rewrite nested dicts in place.
        config = config_class.from_dict(copy.deepcopy(dict(raw)))
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UnsupportedModel(f"config.json: {error}") from error
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedModel("models with cross-attention are not supported")
    return config


def geometry_of(config: Any) -> Geometry:
    """Return the sizes that a parsed config implies."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    longest = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("longrope", "dynamic"):
        # Beyond this length these change the frequencies of *all* positions, which cached keys cannot follow.
        original = getattr(config, "original_max_position_embeddings", None)
        longest = min(longest, original or rope.get("original_max_position_embeddings") or longest)
    return Geometry(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocabulary=config.vocab_size,
        longest=longest,
    )
