"""Random models in memory, and what the engine benchmark records of them."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from benchmarks.engine.command import make_engine, parse, run, run_engine, run_sequentially, run_transformers
from benchmarks.harness.random_model import random_model
from invoker.engine.paths import LayerPath

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_random_model_is_the_same_to_engine_and_transformers(config: PreTrainedConfig) -> None:
    model = random_model(config, "float32", "cpu", context=64)
    prompts = [[3, 1, 4], [1, 5, 9], [2, 6, 5]]
    engine = make_engine(model, 3, LayerPath.AUTO)
    with torch.inference_mode():
        ours = run_engine(engine, prompts, 9)
        assert ours.tokens == run_transformers(model, prompts, 9).tokens
        assert ours.tokens == run_sequentially(model, prompts, 9).tokens
    assert [len(tokens) for tokens in ours.tokens] == [9, 9, 9]
    assert all(0 < first < ours.seconds for first in ours.first_s)


def test_each_contender_and_batch_has_a_record() -> None:
    args = parse(["--batch", "1,2", "--prompt", "4", "--tokens", "5", "--rounds", "1", "--links", "off"])
    rows = run(args, CONFIGS["llama"])
    figures = [
        (row["name"], row["params"]["batch"], row["params"]["mode"], row["params"].get("stages"))
        for row in rows
    ]
    assert figures == [
        ("hypercast", 1, "alone", None),
        ("transformers", 1, "alone", None),
        ("pipeline", 1, "alone", 2),  # of two layers there are no four stages
        ("hypercast", 2, "batched", None),
        ("transformers", 2, "batched", None),
        ("transformers", 2, "sequential", None),
        ("pipeline", 2, "batched", 2),
    ]
    whole, piped = rows[0]["median_s"], rows[2]
    assert piped["stage_ms"] == pytest.approx((piped["median_s"] - whole) * 1e3 / (5 * 2))
    for row in rows:
        assert row["params"]["tokens_equal"]
        assert row["tokens_per_s"] == pytest.approx(row["params"]["batch"] * 5 / row["median_s"])
        assert 0 < row["ttft_s"] < row["median_s"] and row["limit_s"] > 0
