"""`kill -9` of the node that runs twenty streams: each goes on elsewhere, token by token, billed once."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fixtures.platform import COMMAND_S, Platform

MODEL = "killed"
TOKENS, BEGUN = 120, 4  # far from the end, as who reads may lag behind
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


@dataclass
class Stream:
    """A completion as its caller saw it, event by event."""

    request_id: str
    body: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    finish: str = ""
    last: str = ""
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, http: httpx2.AsyncClient) -> None:
        headers = {"x-request-id": self.request_id}
        async with http.stream("POST", "/v1/completions", json=self.body, headers=headers) as response:
            assert response.status_code == 200
            assert response.headers["x-request-id"] == self.request_id
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                self.last = line
                if line == "data: [DONE]":
                    return
                event = json.loads(line.removeprefix("data: "))
                self.usage = event.get("usage") or self.usage
                for choice in event["choices"]:
                    self.ids += choice.get("token_ids") or []
                    self.text += choice["text"]
                    self.finish = choice["finish_reason"] or self.finish
                if len(self.ids) >= BEGUN:
                    self.started.set()


@pytest.fixture(scope="module")
def killed(platform: Platform, root: Path) -> Iterator[str]:
    """Yield a function whose streams are all on one node."""
    one = ("--min-instances", "1", "--max-instances", "1", "--target-concurrency", "32")
    platform.run("deploy", str(root / "functions" / "tiny-coder"), "--name", MODEL, *one)
    yield MODEL
    platform.run("delete", MODEL, "--yes")


def twenty(run: str) -> list[Stream]:
    """Ten greedy streams and ten that are sampled with a seed."""
    common = {
        "model": MODEL,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    greedy = [{**common, "prompt": f"def f{n}(", "temperature": 0} for n in range(10)]
    seeded = [{**common, "prompt": f"class C{n}:", "seed": n, **SAMPLED} for n in range(10)]
    return [Stream(f"{run}-{n}", body) for n, body in enumerate([*greedy, *seeded])]


def served(platform: Platform, run: str, *, kill: bool) -> list[Stream]:
    """Return the twenty at once; with `kill`, their node dies when each has started and none is over."""
    streams = twenty(run)

    (instance,) = platform.instances(MODEL)

    async def main() -> None:
        headers = {"authorization": f"Bearer {platform.key}"}
        limits = httpx2.Limits(max_connections=len(streams))
        async with (
            httpx2.AsyncClient(
                base_url=platform.url, headers=headers, timeout=COMMAND_S, limits=limits, trust_env=False
            ) as http,
            asyncio.TaskGroup() as group,
        ):
            for stream in streams:
                group.create_task(stream.run(http))
            for stream in streams:
                await stream.started.wait()
            if kill:
                assert not any(stream.finish for stream in streams)
                os.kill(instance["pid"], signal.SIGKILL)

    asyncio.run(main())
    return streams


def test_twenty_streams_go_on_when_their_node_is_killed(platform: Platform, killed: str) -> None:
    platform.until("it is ready", lambda: [i for i in platform.instances(killed) if i["state"] == "ready"])
    undisturbed = served(platform, "undisturbed", kill=False)
    disturbed = served(platform, "disturbed", kill=True)
    for stream, wanted in zip(disturbed, undisturbed, strict=True):
        assert stream.last == "data: [DONE]"
        assert len(stream.ids) == TOKENS
        assert (stream.ids, stream.text, stream.finish) == (wanted.ids, wanted.text, "length")
        assert stream.usage == wanted.usage
    with platform.http() as http:
        nodes = set()
        for stream in disturbed:
            row = http.get(f"/admin/usage/show/{stream.request_id}").raise_for_status().json()
            assert (row["status"], row["completion_tokens"]) == ("ok", TOKENS)
            nodes.add(tuple(dict.fromkeys(part["node"] for part in row["gpu"])))
        assert all(len(parts) == 2 for parts in nodes), "each ran on two nodes"
    rows = [row for row in platform.json("usage", "report") if row["function"] == killed]
    assert sum(row["requests"] for row in rows) == len(undisturbed) + len(disturbed)  # one row each
    platform.until("the node is back", lambda: len(platform.nodes()) == 3)
