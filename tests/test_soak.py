"""Minutes of mixed load while nodes are killed: every stream whole, every record there once."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.platform_fixture import Platform

SECONDS = float(os.environ.get("HYPERCAST_SOAK_SECONDS", "180"))
CALLERS, TOKENS = 6, 48


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 2 + 300)
def test_streams_and_bill_survive_killed_nodes(platform: Platform, root: Path) -> None:
    platform.run("deploy", str(root / "functions" / "tiny-coder"), "--name", "soaked", "--keep-alive", "5s")
    platform.run("warm", "soaked", "--nodes", "3")
    chance = random.Random(5)
    deadline = time.monotonic() + SECONDS
    served: dict[str, int] = {}

    async def caller(index: int, client: AsyncOpenAI, wanted: dict[int, str]) -> None:
        while time.monotonic() < deadline:
            seed = chance.randrange(4)
            stream = await client.completions.create(
                model="soaked",
                prompt=f"def f{seed}(",
                max_tokens=TOKENS,
                temperature=0.7,
                seed=seed,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            text = ""
            async for chunk in stream:
                text += "".join(choice.text for choice in chunk.choices)
                if chunk.usage:
                    assert chunk.usage.completion_tokens == TOKENS
                    served[chunk.hypercast["request_id"]] = index  # type: ignore[attr-defined]
            assert text == wanted.setdefault(seed, text), "a stream was not what its seed gives"
            if chance.random() < 0.05:
                await asyncio.sleep(6)  # long enough for instances to go to sleep

    async def killer() -> int:
        kills = 0
        while time.monotonic() < deadline - 5:
            await asyncio.sleep(chance.uniform(2, 6))
            nodes = await asyncio.to_thread(platform.nodes)
            if len(nodes) == 3:
                os.kill(chance.choice(nodes)["pid"], signal.SIGKILL)
                kills += 1
        return kills

    async def run() -> int:
        wanted: dict[int, str] = {}
        async with AsyncOpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0) as client:
            async with asyncio.TaskGroup() as group:
                killing = group.create_task(killer())
                for index in range(CALLERS):
                    group.create_task(caller(index, client, wanted))
            return killing.result()

    kills = asyncio.run(run())
    assert kills > SECONDS / 10
    row = next(row for row in platform.json("usage", "report") if row["function"] == "soaked")
    assert row["requests"] == len(served)
    assert row["completion_tokens"] == TOKENS * len(served)
    platform.run("delete", "soaked", "--yes")
