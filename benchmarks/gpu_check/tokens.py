"""Tokens of the engine compared with transformers' for each decoder family, on tiny random models."""

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

from benchmarks.engine.command import make_engine, run_engine, run_transformers
from benchmarks.gpu_check.parts import PartTask, Row, row
from benchmarks.harness.random_model import RandomModel, random_model
from invoker.engine.decoder import DecoderEngine
from invoker.engine.paths import LayerPath

DEVIATION = 0.15  # standard deviation of weights: a missing bias or wrong mask then changes tokens
CONTEXT = 256
# Allowed distance of a chosen token's logit below the reference's best, in standard deviations of the row:
# rounding stays well below it, while a random token is about three standard deviations below.
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
class _EngineMode:
    """A layer path and graph mode of the engine."""

    path: LayerPath
    capture: Literal["auto", "off"]


def check(task: PartTask) -> list[Row]:
    """Return a row per family, dtype, layer path and decode mode."""
    length = 6 if task.small else 32
    rows = []
    for family, config in FAMILIES.items():
        for dtype in ("float32", "bfloat16"):
            if task.left_s < 5:
                rows.append(row("tokens", {"family": family, "dtype": dtype}, skipped="no time left"))
                continue
            model = random_model(config(), dtype, task.device, context=CONTEXT, deviation=DEVIATION)
            rows += _check_model(task, family, dtype, model, length)
            del model
            gc.collect()
        task.say(f"tokens: {family}")
    return rows


# Transformers batches prompts of equal length; the others run one by one.
def _check_model(task: PartTask, family: str, dtype: str, model: RandomModel, length: int) -> list[Row]:
    generator = torch.Generator().manual_seed(1)

    def prompt(tokens: int) -> list[int]:
        return torch.randint(3, 512, (tokens,), generator=generator).tolist()

    equal = [prompt(24) for _ in range(2 if task.small else 6)]
    lengths = (40,) if task.small else (1, 17, 70)
    prompts = [*equal, *(prompt(tokens) for tokens in lengths)]
    with torch.inference_mode():
        expected = run_transformers(model, equal, length).tokens
    rows = []
    for mode in _engine_modes(task):
        params: Row = {"family": family, "dtype": dtype, "path": mode.path.value, "graphs": mode.capture}
        engine = _engine(model, len(prompts), mode)
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


def _engine_modes(task: PartTask) -> list[_EngineMode]:
    modes = [_EngineMode(LayerPath.HUGGING_FACE, "off"), _EngineMode(LayerPath.FUSED, "off")]
    return [*modes, _EngineMode(LayerPath.FUSED, "auto")] if task.cuda else modes


def _engine(model: RandomModel, sequences: int, mode: _EngineMode) -> DecoderEngine | str:
    """Return the engine, or the reason why there is none."""
    engine = make_engine(model, sequences, mode.path, mode.capture, prefill_budget=48)
    if (taken := engine.path) is not mode.path:
        engine.close()
        return f"its layers use the path {taken.value}"
    return engine


@torch.inference_mode()
def worst_gap(
    reference: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> float:
    """Return the worst chosen token's distance below the best logit, in standard deviations of its row.

    The reference runs over prompt and tokens at once, so that one differing token does not excuse the rest.
    """
    worst = 0.0
    for prompt, chosen in zip(prompts, tokens, strict=True):
        ids = torch.tensor([[*prompt, *chosen]], device=reference.device)
        logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
        picked = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        gaps = (logits.max(dim=1).values - picked) / logits.std(dim=1)
        worst = max(worst, float(gaps.max()) if bool(gaps.isfinite().all()) else math.inf)
    return worst
