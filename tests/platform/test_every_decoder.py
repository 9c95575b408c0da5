"""Every decoder architecture over HTTP, whole and by live pipelines, as transformers: for `make soak`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai import AsyncOpenAI
from transformers import PreTrainedModel

from tests.fixtures.decoders import CONFIGS, VOCABULARY, write_decoder
from tests.fixtures.platform import Platform

LAYERS = 16  # several blocks, so that some arrive long before the others
LENGTHS = (1, 5, 9, 17, 24, 24, 30, 40)
NEW_TOKENS, AT_ONCE = 32, 4
NEAR_TIE = 1e-4  # of two logits: a batch computes their last bits in another order


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Start three nodes on three hosts; over their links a model of these takes seconds."""
    flags = ("--nodes", "3", "--hosts", "3", "--link-rate", "2mbit")
    running = Platform(data=tmp_path_factory.mktemp("every") / "data", flags=flags)
    running.up()
    yield running
    running.down()


async def _complete(
    platform: Platform, model: str, prompts: list[list[int]]
) -> tuple[list[list[int]], set[str]]:
    """Return the tokens, and the kinds of starts."""
    kinds: set[str] = set()
    async with AsyncOpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0) as client:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: list[int]) -> list[int]:
            async with limit:
                raw = await client.completions.with_raw_response.create(
                    model=model,
                    prompt=prompt,
                    max_tokens=NEW_TOKENS,
                    temperature=0,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )
            kinds.add(raw.headers["x-start-kind"])
            return raw.parse().choices[0].token_ids  # type: ignore[attr-defined, no-any-return]

        return list(await asyncio.gather(*map(one, prompts))), kinds


def _check(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    assert len(tokens) == NEW_TOKENS
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(dim=-1).values - chosen).max() < NEAR_TIE


@pytest.mark.soak
@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_over_http_and_by_live_pipelines(slow: Platform, tmp_path: Path, kind: str) -> None:
    model = write_decoder(kind, tmp_path, LAYERS)
    name = kind.replace("_", "-")
    flags = ("--live", "pipeline", "--keep-alive", "10m", "--target-concurrency", "8", "--max-instances", "2")
    slow.run("deploy", str(tmp_path), "--name", name, *flags)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    whole, _ = asyncio.run(_complete(slow, name, prompts))
    for prompt, tokens in zip(prompts, whole, strict=True):
        _check(model, prompt, tokens)
    slow.run("scale", name, "--instances", "0")
    slow.until("none runs it", lambda: not slow.instances(name))
    slow.run("evict", name, "--tier", "gpu")
    held = {node["id"] for node in slow.nodes() if f"{name}:1" in node["tiers"]["host"]}
    for node in sorted(held)[1:]:
        slow.run("evict", name, "--on", node)
    cold = [node["id"] for node in slow.nodes() if node["id"] not in sorted(held)[:1]]
    with slow.http() as http:
        wish = {"instances": 2, "on": cold, "wait": False}
        assert http.post(f"/admin/functions/{name}/scale", json=wish).status_code == 200
    live, kinds = asyncio.run(_complete(slow, name, prompts))
    assert live == whole and "live" in kinds
    slow.run("delete", name, "--yes")
