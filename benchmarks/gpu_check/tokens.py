"""Tokens of the engine beside transformers' for each decoder family, on random weights of tiny models."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from benchmarks.engine import run_engine, run_transformers
from benchmarks.gpu_parts import Row, Task, row
from benchmarks.random_model import RandomModel, random_model
from invoker.engine.decoder import DecoderEngine
from invoker.engine.factory import kv_bytes_needed
from invoker.engine.paths import LayerPath

DEVIATION = 0.15  # of the weights: large enough that a missing bias or a wrong mask changes the tokens
CONTEXT = 256
# How far a chosen token's logit may lie below the reference's best, in deviations of that row of logits:
# rounding stays well below it, while a token chosen at random lies about three deviations below.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}
_PHI3 = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama3-tied": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_LLAMA3), tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SIZES, head_dim=64),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=24, **_WINDOWS),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=12),
    "phi3": lambda: Phi3Config(**_SIZES, rope_parameters=dict(_PHI3)),
    "gpt2": lambda: GPT2Config(
        vocab_size=512, n_positions=512, n_embd=64, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2
    ),
}


@dataclass(frozen=True, slots=True)
class _Way:
    """How the engine runs a model."""

    path: LayerPath
    capture: Literal["auto", "off"]


def check(task: Task) -> list[Row]:
    """A row a family, dtype, path of the layers and way to decode."""
    length = 6 if task.small else 32
    rows = []
    for family, config in FAMILIES.items():
        for dtype in ("float32", "bfloat16"):
            if task.left_s < 5:
                rows.append(row("tokens", {"family": family, "dtype": dtype}, skipped="no time was left"))
                continue
            model = random_model(config(), dtype, task.device, context=CONTEXT, deviation=DEVIATION)
            rows += _check_model(task, family, dtype, model, length)
            del model
            gc.collect()
        task.say(f"tokens: {family}")
    return rows


# Prompts of equal length are what transformers takes as a batch; the others have it run one by one.
def _check_model(task: Task, family: str, dtype: str, model: RandomModel, length: int) -> list[Row]:
    generator = torch.Generator().manual_seed(1)

    def prompt(tokens: int) -> list[int]:
        return torch.randint(3, 512, (tokens,), generator=generator).tolist()

    equal = [prompt(24) for _ in range(2 if task.small else 6)]
    lengths = (40,) if task.small else (1, 17, 70)
    prompts = [*equal, *(prompt(tokens) for tokens in lengths)]
    with torch.inference_mode():
        expected = run_transformers(model, equal, length).tokens
    rows = []
    for way in _ways(task):
        params: Row = {"family": family, "dtype": dtype, "path": way.path.value, "graphs": way.capture}
        engine = _engine(model, len(prompts), way)
        if isinstance(engine, str):
            rows.append(row("tokens", params, skipped=engine))
            continue
        tokens = run_engine(engine, prompts, length).tokens
        engine.close()
        gap = worst_gap(model.reference, prompts, tokens)
        same = sum(mine == theirs for mine, theirs in zip(tokens, expected, strict=False))
        rows.append(
            row(
                "tokens",
                params,
                ok=gap <= NEAR_TIE[dtype] and all(len(one) == length for one in tokens),
                sequences=len(prompts),
                tokens=length,
                equal_to_generate=f"{same} of {len(expected)}",
                worst_gap=gap,
                allowed_gap=NEAR_TIE[dtype],
            )
        )
    return rows


def _ways(task: Task) -> list[_Way]:
    ways = [_Way(LayerPath.HUGGING_FACE, "off"), _Way(LayerPath.FUSED, "off")]
    return [*ways, _Way(LayerPath.FUSED, "auto")] if task.cuda else ways


def _engine(model: RandomModel, sequences: int, way: _Way) -> DecoderEngine | str:
    """The engine, or why there is none."""
    spec = model.spec
    kv = kv_bytes_needed(spec.manifest.architecture, spec.config, spec.dtype, spec.context_length, sequences)
    engine = DecoderEngine(
        spec, model.region, kv, max_sequences=sequences, prefill_budget=48, path=way.path, capture=way.capture
    )
    if (taken := engine.path) is not way.path:
        engine.close()
        return f"its layers take the path {taken.value}"
    return engine


@torch.inference_mode()
def worst_gap(
    reference: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> float:
    """How far the worst chosen token lies below the best one, in deviations of its row of logits.

    The reference runs over prompt and tokens at once, so one token that differs does not excuse the rest.
    """
    worst = 0.0
    for prompt, chosen in zip(prompts, tokens, strict=True):
        ids = torch.tensor([[*prompt, *chosen]], device=reference.device)
        logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
        picked = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        gaps = (logits.max(dim=1).values - picked) / logits.std(dim=1)
        worst = max(worst, float(gaps.max()) if bool(gaps.isfinite().all()) else math.inf)
    return worst
