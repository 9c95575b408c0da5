"""Tiny random-weight Hugging Face checkpoints (about 1 MB each), written as `save_pretrained` does.

`write_checkpoint("llama", folder)` writes one; `DECODERS` names the kinds. Weights are larger than
an initialised model's, and biases and norms are random too, so that a wrong scale, a missing bias or
an attention mask that is off by one changes the tokens.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 512
CONTEXT = 512
LAYERS = 4
WINDOW = 12  # shorter than the prompts of most tests

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _qwen3(tied: bool) -> PreTrainedModel:
    # A head size of its own, and windows on the upper half of the layers.
    config = Qwen3Config(
        **_SIZES,
        tie_word_embeddings=tied,
        head_dim=24,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    )
    return Qwen3ForCausalLM(config)


def _gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=LAYERS,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


DECODERS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, rope_parameters=dict(_LLAMA3_ROPE))),
    "llama3-tied": lambda: LlamaForCausalLM(
        LlamaConfig(**_SIZES, rope_parameters=dict(_LLAMA3_ROPE), tie_word_embeddings=True)
    ),
    # A head size with which the biases of k fill whole alignments of an image, so that q|k|v is a view.
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, head_dim=32)),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: _qwen3(tied=False),
    "qwen3-tied": lambda: _qwen3(tied=True),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=WINDOW)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_SIZES, rope_parameters=_PHI3_ROPE)),
    "gpt2": _gpt2,
}
_PHI3_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def make_model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """The model of one of DECODERS, in evaluation mode; the same for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DECODERS[kind]()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
                parameter.normal_(centre, 0.15)
    return model.to(dtype).eval()


def write_checkpoint(
    kind: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    sharded: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """Write one of DECODERS to `folder` (in several shards on request), and return the model."""
    model = make_model(kind, dtype, seed)
    model.save_pretrained(folder, max_shard_size="300KB" if sharded else "50GB")
    return model
