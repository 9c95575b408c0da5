"""`live: auto` decides again while a model loads: calls that queue up after the starts are served live."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fixtures.platform import COMMAND_S, Platform

NODES, READY = 6, 2
CALLS = 48  # at once
PROMPTS = 12
MODEL = "small"
VOCABULARY = 512
MIN_LIVE_CALLS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    prompt: int
    ids: tuple[int, ...]
    start_kind: str


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Six nodes on six hosts; over their links the model takes about 8 s."""
    made = Platform(
        data=tmp_path_factory.mktemp("six") / "data",
        flags=("--nodes", str(NODES), "--hosts", str(NODES), "--link-rate", "1mbit"),
    )
    made.up()
    try:
        model = tmp_path_factory.mktemp("model")
        assert 0.9e6 < write_model(model) < 1.2e6
        limits = ("--max-instances", str(NODES), "--target-concurrency", "8", "--keep-alive", "10m")
        made.run("deploy", str(model), "--name", MODEL, "--dtype", "float32", "--live", "auto", *limits)
        yield made
    finally:
        made.down()


def write_model(folder: Path) -> int:
    """Write a small random Llama without a tokenizer; return its bytes."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters()) * 4


async def ask(http: httpx2.AsyncClient, prompt: int) -> Answer:
    body = {
        "model": MODEL,
        "prompt": [3 + (prompt * 7 + place) % (VOCABULARY - 3) for place in range(8 + prompt % 8)],
        "max_tokens": 120 + prompt,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return Answer(
        prompt=prompt,
        ids=tuple(response.json()["choices"][0]["token_ids"]),
        start_kind=response.headers["x-start-kind"],
    )


def states(six: Platform) -> list[str]:
    return sorted(instance["state"] for instance in six.instances(MODEL))


def decision(six: Platform) -> dict[str, Any]:
    return six.json("describe", MODEL)["live"]


async def scale(six: Platform, instances: int) -> None:
    with six.http() as http:
        body = {"instances": instances, "wait": False}
        assert http.post(f"/admin/functions/{MODEL}/scale", json=body).status_code == 200


async def test_calls_that_queue_up_after_the_starts_are_served_live(six: Platform) -> None:
    async with httpx2.AsyncClient(
        base_url=six.url,
        headers={"authorization": f"Bearer {six.key}"},
        timeout=COMMAND_S,
        limits=httpx2.Limits(max_connections=None),
        trust_env=False,
    ) as http:
        expected = {one.prompt: one.ids for one in [await ask(http, prompt) for prompt in range(PROMPTS)]}
        assert len(states(six)) == 1  # a single node gave all of these
        await scale(six, READY)
        await asyncio.to_thread(six.until, "two are ready", lambda: states(six) == ["ready"] * READY)

        await scale(six, NODES)
        await asyncio.to_thread(six.until, "four load", lambda: states(six).count("loading") == NODES - READY)
        assert decision(six)["way"] == "off"  # the ready instances have free slots
        answers: list[Answer] = []
        over = asyncio.Event()

        async def keep_asking(prompt: int) -> None:
            while not over.is_set():
                answers.append(await ask(http, prompt))
                if sum(answer.start_kind == "live" for answer in answers) >= MIN_LIVE_CALLS:
                    over.set()

        def loads_ended() -> bool:
            return over.is_set() or states(six) == ["ready"] * NODES

        async with asyncio.TaskGroup() as group:
            for call in range(CALLS):
                group.create_task(keep_asking(call % PROMPTS))
            await asyncio.to_thread(six.until, "enough is served live or all are ready", loads_ended)
            over.set()
    assert [answer for answer in answers if answer.ids != expected[answer.prompt]] == []
    live = [answer for answer in answers if answer.start_kind == "live"]
    decided = decision(six)
    assert decided["way"] in ("pipeline", "zigzag") and "queued calls wait" in decided["reason"]
    assert len(live) >= MIN_LIVE_CALLS, (len(live), len(answers), decided)
