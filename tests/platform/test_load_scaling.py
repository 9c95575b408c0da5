"""Scaling by load with real processes: decided at once when prompts wait, taken back half a second later."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.fixtures.platform import COMMAND_S, Platform

MODEL = "thirteen"
NODES = 4
BURST = 60
PROMPT = 1000
DECIDED_S = 1.0  # with the time that this process takes to send the burst; see also test_controller.py
DELAY_S = 0.5


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Four emulated H800s, on each of which a Llama-2 13B runs some twenty prompts a second."""
    made = Platform(
        data=tmp_path_factory.mktemp("four") / "data",
        flags=("--nodes", str(NODES), "--hosts", str(NODES), "--device", "emulated:h800/1000"),
    )
    made.up()
    try:
        made.run(
            *("deploy", "emulated:llama2-13b/1000", "--name", MODEL, "--keep-alive", "10m"),
            *("--scale-down-delay", "500ms", "--tbt-target", "300ms"),
        )
        yield made
    finally:
        made.down()


async def ask(http: httpx2.AsyncClient, number: int, tokens: int) -> None:
    body = {"model": MODEL, "prompt": [number] * PROMPT, "max_tokens": tokens, "ignore_eos": True}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text


def decision(four: Platform) -> dict[str, Any]:
    found: dict[str, Any] = four.get(f"/admin/functions/{MODEL}")["decision"]
    return found


async def until_decided(four: Platform, desired: int, after: float) -> dict[str, Any]:
    """Return the first decision after that moment for at least that number; of one instance for 1."""

    def decided() -> dict[str, Any] | None:
        last = decision(four)
        enough = last["desired"] >= desired if desired > 1 else last["desired"] == 1
        return last if last["at"] > after and enough else None

    return await asyncio.to_thread(four.until, f"{desired} are decided", decided)


async def test_a_burst_is_decided_at_once_and_its_end_half_a_second_later(four: Platform) -> None:
    scaling = four.json("describe", MODEL)["scaling"]
    assert (scaling["policy"], scaling["scale_down_delay_s"], scaling["tbt_target_s"]) == ("load", 0.5, 0.3)
    async with httpx2.AsyncClient(
        base_url=four.url,
        headers={"authorization": f"Bearer {four.key}"},
        timeout=COMMAND_S,
        limits=httpx2.Limits(max_connections=None),
        trust_env=False,
    ) as http:
        await asyncio.gather(*(ask(http, number, 40) for number in range(6)))  # it is seen at work
        begun = time.time()
        calls = [asyncio.create_task(ask(http, number, 2)) for number in range(BURST)]
        grown = await until_decided(four, 3, begun)
        inputs, reason = grown["inputs"], grown["reason"]
        print(f"decided {1e3 * (grown['at'] - begun):.0f} ms after the burst began: {reason}; {inputs}")
        assert grown["at"] < begun + DECIDED_S
        assert inputs["prefill_tokens_s"] > 5000 and inputs["queued_prompt_tokens"] > 10 * PROMPT
        assert f"{inputs['queued_prompt_tokens']} prompt tokens wait" in reason
        await asyncio.gather(*calls)
        ended = time.time()
        fallen = await until_decided(four, 1, grown["at"])
        print(f"down to one {1e3 * (fallen['at'] - ended):.0f} ms after its end: {fallen['reason']}")
        assert fallen["at"] < ended + 4 * DELAY_S
    assert four.json("describe", MODEL)["decision"]["desired"] == 1
    shown = " ".join(four.run("describe", MODEL).stdout.split())  # it wraps lines
    assert "by load: first token within 1s, others every 300ms; down after 500ms" in shown
    assert "Decision" in shown and "1 instance " in shown
    four.until("one is left", lambda: len(four.instances(MODEL)) == 1)
    with four.http() as http:
        assert f'hypercast_desired_instances{{function="{MODEL}",version="1"}} 1' in http.get("/metrics").text
