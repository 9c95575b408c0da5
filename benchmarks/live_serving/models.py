"""Small random checkpoints of the decoder families that serve while loading."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 2048
CONTEXT = 2048
_DEVIATION = 0.1  # above usual initialisation, so that each error changes the tokens
_SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _wide(width: int) -> dict[str, int]:
    heads = width // 32
    return {
        **_SIZES,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
    }


def _llama(width: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_wide(width), tie_word_embeddings=False))


def _qwen2(width: int) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_wide(width), tie_word_embeddings=True))


def _gpt2(width: int) -> PreTrainedModel:
    sizes = {"n_layer": 8, "n_embd": width, "n_head": width // 32, "n_positions": CONTEXT}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **sizes))


# qwen2 and gpt2 have tied heads here: the first stage samples.
FAMILIES: Mapping[str, Callable[[int], PreTrainedModel]] = {"llama": _llama, "qwen2": _qwen2, "gpt2": _gpt2}


def write_model(family: str, width: int, folder: Path) -> int:
    """Write a float32 model with hidden states of `width` (a multiple of 64); return its bytes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family](width)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
                parameter.normal_(centre, _DEVIATION)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters()) * 4
