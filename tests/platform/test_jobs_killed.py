"""A thousand queued calls while a gateway, a node and Redis are killed: each ends once, with one bill."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from standardwebhooks import Webhook

from registry.records.usage import RequestRecord, RequestStatus
from registry.redis.state import RedisState
from registry.state import UsageFilter
from tests.fixtures.hooks import HookReceiver, hook_receiver
from tests.fixtures.patience import until_answered
from tests.fixtures.platform import COMMAND_S, Platform
from tests.fixtures.tls import NO_AUTHORITY

CALLS, AT_ONCE = 1000, 8
KILLS = ("node-0", "gateway", "redis", "gateway-1")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Platform]:
    flags = ("--nodes", "2", "--gateways", "2", "--webhook-allow", "127.0.0.1")
    platform = Platform(data=tmp_path_factory.mktemp("jobs"), flags=flags)
    platform.up()
    try:
        platform.run(
            "deploy", str(root / "functions" / "tiny-coder"), "--name", "coder", "--min-instances", "2"
        )
        yield platform
    finally:
        platform.down()


def urls(platform: Platform) -> list[str]:
    return list(json.loads((platform.data / "up.json").read_text())["urls"])


@asynccontextmanager
async def clients(platform: Platform) -> AsyncIterator[list[httpx2.AsyncClient]]:
    headers = {"authorization": f"Bearer {platform.key}"}
    made = [
        httpx2.AsyncClient(
            base_url=url, headers=headers, timeout=COMMAND_S, trust_env=False, verify=NO_AUTHORITY
        )
        for url in urls(platform)
    ]
    try:
        yield made
    finally:
        for client in made:
            await client.aclose()


async def persistently(
    https: list[httpx2.AsyncClient], method: str, path: str, **more: Any
) -> dict[str, Any]:
    """Return the good answer of a gateway; what fails is sent again, which the ids make safe."""
    tries, last = itertools.cycle(https), ""

    async def answer() -> dict[str, Any] | None:
        nonlocal last
        try:
            found = await next(tries).request(method, path, **more)
        except httpx2.TransportError as error:
            last = repr(error)
            return None
        last = found.text
        assert found.status_code < 300 or found.status_code in (429, 500, 503), last
        return dict(found.json()) if found.status_code < 300 else None

    found = await until_answered(f"{method} {path} is answered", answer, COMMAND_S, lambda: last)
    assert found is not None
    return found


async def call_all(https: list[httpx2.AsyncClient], receiver: HookReceiver) -> list[dict[str, Any]]:
    """Queue all calls and wait for their ends; return them."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def queue(number: int) -> None:
        body = {
            "model": "coder",
            "input": {"prompt": f"def f{number}(", "max_tokens": 3, "ignore_eos": True},
            "webhook": receiver.url,
        }
        async with slots:
            headers = {"prefer": "respond-async"}
            await persistently(https, "PUT", f"/predictions/call-{number}", json=body, headers=headers)

    async def ended(number: int) -> dict[str, Any]:
        async with slots:
            while True:
                headers = {"prefer": "wait=5"}
                found = await persistently(https, "GET", f"/predictions/call-{number}", headers=headers)
                if found["completed_at"] is not None:
                    return found

    async with asyncio.TaskGroup() as group:
        for number in range(CALLS):
            group.create_task(queue(number))
    return list(await asyncio.gather(*map(ended, range(CALLS))))


def kill(platform: Platform, name: str) -> None:
    """Kill a process once it runs: the supervisor may be about to start it again."""

    def found() -> psutil.Process | None:
        try:
            return platform.process(name)
        except (StopIteration, psutil.NoSuchProcess):
            return None

    platform.until(f"{name} runs", found).kill()


async def kill_each(platform: Platform, https: list[httpx2.AsyncClient]) -> None:
    """Kill one process after the other, each once some more calls have ended since the last."""
    for index, name in enumerate(KILLS):
        enough = f"/predictions/call-{(index + 1) * CALLS // (2 * len(KILLS))}"

        async def ended(path: str = enough) -> bool:
            try:
                found = await https[0].get(path, headers={"prefer": "wait=1"})
            except httpx2.TransportError:
                return False
            return found.status_code == 200 and found.json()["completed_at"] is not None

        await until_answered(f"{enough} has ended", ended, COMMAND_S)
        await asyncio.to_thread(kill, platform, name)


async def bills_of(platform: Platform, ids: set[str]) -> list[RequestRecord]:
    async with RedisState.connect(f"unix://{platform.data / 'redis.sock'}") as state:
        found: list[RequestRecord] = []
        cursor = ""
        while True:
            page, cursor = await state.requests(UsageFilter(), cursor=cursor)
            found += [record for record in page if record.request_id in ids]
            if not cursor:
                return found


async def test_each_call_ends_once_with_one_bill_whatever_is_killed(killed: Platform) -> None:
    async with hook_receiver() as receiver, clients(killed) as https:
        killing = asyncio.create_task(kill_each(killed, https))
        over = await call_all(https, receiver)
        await killing
        assert Counter(one["status"] for one in over) == {"succeeded": CALLS}, [
            one["error"] for one in over if one["error"]
        ][:3]
        assert all(one["output"]["usage"]["completion_tokens"] == 3 for one in over)
        ids = {one["request_id"] for one in over}
        assert len(ids) == CALLS
        bills = await bills_of(killed, ids)
        assert Counter(bill.request_id for bill in bills) == Counter(ids)
        assert {bill.status for bill in bills} == {RequestStatus.OK}
        assert {bill.completion_tokens for bill in bills} == {3}  # the bill is that of the result

        wanted = {f"msg_{one}" for one in ids}
        await receiver.until(lambda: {hook.headers["webhook-id"] for hook in receiver.received} >= wanted)
        secret = (await persistently(https, "GET", "/webhooks/secret"))["secret"]
        results = {one["request_id"]: one["output"] for one in over}
        for hook in receiver.received:
            message = Webhook(secret).verify(hook.body, hook.headers)
            data = message["data"]
            assert data["output"] == results[data["request_id"]]  # repeated ones say the same
    checked = await asyncio.to_thread(killed.run, "usage", "check")
    assert checked.returncode == 0


async def test_each_line_of_a_batch_ends_once_whatever_is_killed(killed: Platform) -> None:
    lines = 300
    calls = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "coder", "prompt": f"x{number} = ", "max_tokens": 2, "ignore_eos": True},
        }
        for number in range(lines)
    ]
    content = "\n".join(map(json.dumps, calls)).encode()
    async with clients(killed) as https:
        upload = {"files": {"file": ("calls.jsonl", content)}, "data": {"purpose": "batch"}}
        file = await persistently(https, "POST", "/v1/files", **upload)
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await persistently(https, "POST", "/v1/batches", json=asked)
        path = f"/v1/batches/{batch['id']}"
        victims = [("gateway", 40), ("redis", 90), ("node-1", 140), ("gateway-1", 190)]

        async def completed() -> dict[str, Any] | None:
            found = await persistently(https, "GET", path)
            assert found["status"] in ("validating", "in_progress", "finalizing", "completed"), found
            if victims and found["request_counts"]["completed"] >= victims[0][1]:
                await asyncio.to_thread(kill, killed, victims.pop(0)[0])
            return found if found["status"] == "completed" else None

        found = await until_answered("the batch is completed", completed, COMMAND_S)
        assert found is not None
        assert found["request_counts"] == {"total": lines, "completed": lines, "failed": 0}
        assert found["error_file_id"] is None and not victims
        client = AsyncOpenAI(
            base_url=f"{urls(killed)[0]}/v1",
            api_key=killed.key,
            max_retries=20,
            http_client=DefaultAsyncHttpxClient(verify=NO_AUTHORITY, trust_env=False),
        )
        async with client:
            output = await client.files.content(found["output_file_id"])
        results = [json.loads(line) for line in output.text.splitlines()]
        assert Counter(one["custom_id"] for one in results) == Counter(map(str, range(lines)))
        ids = {one["response"]["request_id"] for one in results}
        bills = await bills_of(killed, ids)
        assert Counter(bill.request_id for bill in bills) == Counter(ids) and len(ids) == lines
    checked = await asyncio.to_thread(killed.run, "usage", "check")
    assert checked.returncode == 0
