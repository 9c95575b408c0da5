"""Tokens over HTTP, through gateway, channel and engine, against transformers' own full forward."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI
from transformers import PreTrainedModel

from tests.fixtures.checkpoints import DECODERS, VOCABULARY, write_checkpoint
from tests.fixtures.platform import Platform

PROMPTS, NEW_TOKENS, AT_ONCE = 16, 32, 8


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Tokens by a full forward of the whole sequence each time: no cache to be wrong."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


async def complete(platform: Platform, model: str, prompts: list[list[int]]) -> list[list[int]]:
    async with AsyncOpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0) as client:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: list[int]) -> list[int]:
            async with limit:
                answer = await client.completions.create(
                    model=model,
                    prompt=prompt,
                    max_tokens=NEW_TOKENS,
                    temperature=0,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )
            assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
            return answer.choices[0].token_ids  # type: ignore[attr-defined, no-any-return]

        return await asyncio.gather(*map(one, prompts))


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_greedy_tokens_equal_transformers(platform: Platform, tmp_path: Path, kind: str) -> None:
    sharded = kind in ("llama", "qwen3", "gpt2")
    model = write_checkpoint(kind, tmp_path / kind, sharded=sharded)
    assert sharded == (tmp_path / kind / "model.safetensors.index.json").exists()
    platform.run("deploy", str(tmp_path / kind), "--name", kind, "--target-concurrency", "8")
    generator = np.random.default_rng(3)
    prompts = [
        generator.integers(3, VOCABULARY, size=int(length)).tolist()
        for length in generator.integers(1, 60, size=PROMPTS)
    ]
    answers = asyncio.run(complete(platform, kind, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy(model, prompt)
    platform.run("delete", kind, "--yes")
