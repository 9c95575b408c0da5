"""Tokens per second of the engine, eager and with CUDA graphs, beside transformers and the limit."""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import LlamaConfig

from benchmarks.engine.command import Generated, Prompts, make_engine, run_engine, run_transformers
from benchmarks.gpu_check.parts import PartTask, Row, best_s, release_cached_memory, row
from benchmarks.harness.random_model import RandomModel, llama_8b, random_model

_ROUNDS = 2
_MIN_LEFT_S = 20.0  # no batch is started with less time left


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationShape:
    """The model and lengths to generate with."""

    config: LlamaConfig
    dtype: str
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    scanned_bytes: int


def shape_for(task: PartTask) -> GenerationShape:
    """Return the 8B shape, with fewer layers where the device has less memory."""
    if task.small:
        tiny = LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
        return GenerationShape(
            config=tiny, dtype="float32", batches=(1, 8), prompt=8, tokens=8, scanned_bytes=64 << 20
        )
    config = llama_8b()
    free = torch.cuda.mem_get_info(task.device)[0]
    # A layer takes about 0.44 GB, the ends 2.1 GB, and transformers briefly has its own weights.
    config.num_hidden_layers = max(1, min(config.num_hidden_layers, int((free * 0.42 - 2.5e9) / 0.44e9)))
    return GenerationShape(
        config=config, dtype="bfloat16", batches=(1, 8, 32), prompt=128, tokens=64, scanned_bytes=4 << 30
    )


@torch.inference_mode()
def check(task: PartTask) -> list[Row]:
    """Return rows of both engines, transformers and the limit per batch size."""
    shape = shape_for(task)
    rates = memory_rates(task.device, shape.scanned_bytes)
    rows = [row("limit", {"what": what}, gb_per_s=rate / 1e9) for what, rate in rates.items()]
    model = random_model(
        shape.config, shape.dtype, task.device, context=-(-(shape.prompt + shape.tokens) // 64) * 64
    )
    task.say(f"speed: {model.spec.manifest.nbytes / 1e9:.2f} GB of weights on {task.device}")
    for batch in shape.batches:
        if task.left_s < (1 if task.small else _MIN_LEFT_S):
            rows.append(row("hypercast", {"batch": batch}, skipped="no time left"))
            continue
        rows += _batch(task, model, shape, batch, max(rates.values()))
    del model
    gc.collect()
    release_cached_memory(task.device)
    return rows


def memory_rates(device: str, nbytes: int) -> dict[str, float]:
    """Return the device's bytes per second in a sum (read) and in a copy (read and write)."""
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return {
        "read": nbytes / best_s(lambda: source.sum(), device),
        "copy": 2 * nbytes / best_s(lambda: target.copy_(source), device),
    }


def read_bytes(model: RandomModel) -> int:
    """Return the weight bytes that a decode step reads; an untied embedding contributes only some rows."""
    manifest = model.spec.manifest
    embedding = sum(one.nbytes for one in manifest.tensors if one.name == "model.embed_tokens.weight")
    return manifest.nbytes - (0 if manifest.tied_head else embedding)


def _batch(task: PartTask, model: RandomModel, shape: GenerationShape, batch: int, rate: float) -> list[Row]:
    generator = torch.Generator().manual_seed(2)
    prompts: Prompts = torch.randint(3, 500, (batch, shape.prompt), generator=generator).tolist()
    limit = batch * rate / read_bytes(model)
    rows, found = [], {}
    for name, mode, make in _contenders(task, model, shape, batch):
        run, end = make()
        run(prompts)  # captures graphs, selects kernels
        rounds = [run(prompts) for _ in range(_ROUNDS)]
        end()
        release_cached_memory(task.device)
        found[name, mode] = rounds[-1].tokens
        rows.append(_row(name, mode, shape, model, batch, rounds, limit))
        task.say(f"speed: batch {batch}, {name} {mode}: {rows[-1]['decode_tokens_per_s']:.1f} tokens/s")
    for one in rows:
        key = one["name"], one["params"]["mode"]
        one["same_tokens_as_eager"] = _same(found[key], found["hypercast", "eager"])
    return rows


Run = Callable[[Prompts], Generated]


def _contenders(
    task: PartTask, model: RandomModel, shape: GenerationShape, batch: int
) -> list[tuple[str, str, Callable[[], tuple[Run, Callable[[], None]]]]]:
    """Return name, mode, and a factory of run and close functions."""

    def ours(capture: Literal["auto", "off"]) -> tuple[Run, Callable[[], None]]:
        engine = make_engine(model, batch, capture=capture, prefill_budget=4096)
        return lambda prompts: run_engine(engine, prompts, shape.tokens), engine.close

    def theirs() -> tuple[Run, Callable[[], None]]:
        return lambda prompts: run_transformers(model, prompts, shape.tokens), lambda: None

    found = [("hypercast", "eager", lambda: ours("off")), ("transformers", "generate", theirs)]
    return [*found, ("hypercast", "graphs", lambda: ours("auto"))] if task.cuda else found


def _row(
    name: str,
    mode: str,
    shape: GenerationShape,
    model: RandomModel,
    batch: int,
    rounds: Sequence[Generated],
    limit: float,
) -> Row:
    seconds = [one.seconds for one in rounds]
    decode_s = statistics.median(one.seconds - max(one.first_s) for one in rounds)
    decoded = batch * (shape.tokens - 1) / decode_s
    params: Row = {
        "batch": batch,
        "mode": mode,
        "dtype": shape.dtype,
        "layers": shape.config.num_hidden_layers,
        "weight_bytes": model.spec.manifest.nbytes,
        "prompt_tokens": shape.prompt,
        "output_tokens": shape.tokens,
    }
    return row(
        name,
        params,
        seconds=seconds,
        tokens_per_s=batch * shape.tokens / statistics.median(seconds),
        decode_tokens_per_s=decoded,
        ttft_s=statistics.median(one.first_s[0] for one in rounds),
        limit_tokens_per_s=limit,
        share_of_limit=decoded / limit,
    )


def _same(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of positions with equal tokens; random bfloat16 weights diverge soon."""
    pairs = [pair for one, other in zip(mine, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)
