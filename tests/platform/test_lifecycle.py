"""`up` and `down` with a data directory of their own: what stays, how long it takes, what comes back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.fixtures.checkpoints import write_checkpoint
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.platform import Platform

READY_LIMIT_S = 60.0  # or, on a slow machine, three times what the first start took; an idle one needs 4


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    made = Platform(data=tmp_path_factory.mktemp("own"), flags=("--nodes", "2"))
    made.up()
    yield made
    made.down()


def ask(own: Platform) -> str:
    with OpenAI(base_url=f"{own.url}/v1", api_key=own.key, max_retries=0) as client:
        raw = client.completions.with_raw_response.create(
            model="small", prompt=[5, 6], max_tokens=4, extra_body={"ignore_eos": True}
        )
        return str(raw.headers["x-function-version"])


def bill(own: Platform) -> list[dict[str, object]]:
    return own.json("usage", "report")  # type: ignore[no-any-return]


def test_it_comes_back_with_functions_keys_images_and_bills(own: Platform, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "one")
    made = own.json("deploy", str(tmp_path / "one"), "--name", "small")
    assert made["version"] == 1 and len(made["image"]) == 64 and made["blocks"] >= 1
    assert ask(own) == "1"
    key = own.run("keys", "create", "--tenant", "acme").stdout.strip()
    before = bill(own)
    assert before[0]["requests"] == 1
    own.down()
    assert own.up() < max(READY_LIMIT_S, 3 * own.first_s)
    assert bill(own) == before
    assert ask(own) == "1"
    with OpenAI(base_url=f"{own.url}/v1", api_key=key, max_retries=0) as client:
        assert "small" in {model.id for model in client.models.list()}
    assert (own.data / "admin.key").stat().st_mode & 0o777 == 0o600


def test_a_redeploy_switches_without_a_failed_request(own: Platform, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "two", seed=2)
    versions: list[str] = []

    async def load(stop: asyncio.Event) -> None:
        async with AsyncOpenAI(base_url=f"{own.url}/v1", api_key=own.key, max_retries=0) as client:
            while not stop.is_set():
                raw = await client.completions.with_raw_response.create(
                    model="small", prompt=[5, 6, 7], max_tokens=4, extra_body={"ignore_eos": True}
                )
                versions.append(raw.headers["x-function-version"])

    async def switch() -> None:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as callers:
            for _ in range(4):
                callers.create_task(load(stop))
            await asyncio.to_thread(own.until, "the old version answers", lambda: versions)
            await asyncio.to_thread(own.run, "deploy", str(tmp_path / "two"), "--name", "small")
            await asyncio.to_thread(own.until, "the new version answers", lambda: "2" in versions)
            stop.set()

    asyncio.run(switch())
    assert {"1", "2"} <= set(versions)
    own.run("rollback", "small", "--to", "1")
    own.until("the old version answers", lambda: ask(own) == "1")


def test_a_child_that_dies_is_started_again(own: Platform) -> None:
    gateway = own.process("gateway")
    gateway.kill()
    gateway.wait(PATIENCE_S)

    def back() -> bool:
        try:
            with own.http() as http:
                return http.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return False

    own.until("the gateway is back", back)
    assert ask(own) == "1"
