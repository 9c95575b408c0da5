"""Files and batches as the official client of OpenAI uses them."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from gateway.core.contract import DispatchError, Event, FunctionCall
from gateway.core.settings import JobSettings
from gateway.fakes.dispatcher import HOT, FakeDispatcher
from registry.config.secrets import new_api_key
from registry.memory.state import MemoryState
from registry.messages.node import Generate, RequestUsage
from registry.records.api_key import KeyRole
from registry.records.usage import RequestStatus
from registry.state import UsageFilter
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def serving(
    script: Any = None, state: MemoryState | None = None, **jobs: Any
) -> AsyncIterator[tuple[Gateway, AsyncOpenAI]]:
    async with gateway(state=state, jobs=JobSettings(**jobs)) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.dispatcher.script = script or gw.dispatcher.script
        yield gw, gw.openai()


def line(custom_id: str, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> dict[str, Any]:
    asked = {"model": "coder", "prompt": "hello", "max_tokens": 2, **body}
    return {"custom_id": custom_id, "method": method, "url": url, "body": asked}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def started(client: AsyncOpenAI, content: bytes, endpoint: Any = COMPLETIONS, **more: Any) -> Batch:
    file = await client.files.create(file=("calls.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def reached(gw: Gateway, client: AsyncOpenAI, batch_id: str, *wanted: str) -> Batch:
    """Return a batch once it has one of these states; its events wake this."""
    news = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S):
        with gw.services.job_events.listening(lambda _: news.set()):
            while True:
                news.clear()
                batch = await client.batches.retrieve(batch_id)
                if batch.status in wanted:
                    return batch
                await news.wait()


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return [json.loads(one) for one in content.text.splitlines()]


async def test_files_are_stored_listed_read_and_deleted() -> None:
    async with serving() as (gw, client):
        content = b"".join(b"%d\n" % n for n in range(1_000_000))  # several parts
        stored = await client.files.create(file=("numbers.txt", content), purpose="user_data")
        assert (stored.bytes, stored.filename, stored.purpose) == (len(content), "numbers.txt", "user_data")
        assert (await client.files.content(stored.id)).content == content
        assert await client.files.retrieve(stored.id) == stored
        more = [await client.files.create(file=(f"{n}", b"x" * (n + 1)), purpose="batch") for n in range(3)]
        listed = [file.id async for file in client.files.list(purpose="batch", limit=2)]
        assert listed == [file.id for file in reversed(more)]  # over two pages
        first = [file.id async for file in client.files.list(order="asc")]
        assert first == [stored.id, *[file.id for file in more]]
        assert (await client.files.delete(stored.id)).deleted
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await gone(stored.id)
        stranger = new_api_key("beta", KeyRole.CALLER, "stranger")
        await gw.state.put_key(stranger.key)
        other = gw.openai(stranger.plaintext)
        assert [file async for file in other.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await other.files.content(more[0].id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(
                input_file_id=more[0].id, endpoint=COMPLETIONS, completion_window="24h"
            )


async def test_what_is_no_file_is_refused() -> None:
    async with serving(upload_bytes=1000, files=4) as (gw, client):
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("a", b"x"), purpose="fine-tune")
        with pytest.raises(openai.APIStatusError) as large:
            await client.files.create(file=("a", io.BytesIO(b"x" * 100_000)), purpose="batch")
        assert large.value.status_code == 413
        async with gw.http(gw.caller_key) as http:
            assert (await http.post("/v1/files", json={})).status_code == 400
            assert (await http.post("/v1/files", data={"purpose": "batch"}, files={})).status_code == 400
            wrong = await http.post("/v1/files", files={"other": ("a", b"x")}, data={"purpose": "batch"})
            assert wrong.status_code == 400
            headers = {"content-type": "multipart/form-data; boundary=b"}
            broken = await http.post("/v1/files", content=b"--b\r\nno", headers=headers)
            assert broken.status_code == 400, broken.text
        for name in ("a", "b"):
            await client.files.create(file=(name, name.encode()), purpose="batch")
        with pytest.raises(openai.RateLimitError):
            await client.files.create(file=("c", b"c"), purpose="batch")


async def test_a_batch_runs_all_lines_each_with_one_bill() -> None:
    async with serving() as (gw, client):
        content = jsonl(*[line(f"call-{n}", prompt=f"hello {n}") for n in range(150)])
        batch = await started(client, content, metadata={"of": "tests"})
        assert batch.status == "validating" and batch.metadata == {"of": "tests"}
        done = await reached(gw, client, batch.id, "completed")
        assert done.request_counts is not None
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (150, 150, 0)
        assert done.error_file_id is None and done.in_progress_at and done.completed_at
        results = await lines_of(client, done.output_file_id)
        assert sorted(one["custom_id"] for one in results) == sorted(f"call-{n}" for n in range(150))
        assert {one["response"]["status_code"] for one in results} == {200}
        assert all(one["response"]["body"]["usage"]["completion_tokens"] == 2 for one in results)
        bills, _ = await gw.state.requests(UsageFilter())
        assert sorted(bill.request_id for bill in bills) == sorted(
            one["response"]["request_id"] for one in results
        )
        assert {bill.status for bill in bills} == {RequestStatus.OK}
        assert all(one.background for one in gw.dispatcher.calls)
        assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
        output = await client.files.retrieve(done.output_file_id or "")
        assert output.purpose == "batch_output"


async def test_lines_that_fail_are_in_the_error_file() -> None:
    async def fails_some(call: FunctionCall) -> AsyncIterator[Event]:
        assert isinstance(call.work, Generate)
        if len(call.work.prompt_ids) > 5:
            yield HOT
            raise DispatchError("function_error", "no luck", status=500)
        async for event in FakeDispatcher().script(call):
            yield event

    async with serving(fails_some) as (gw, client):
        lines = [
            line("good", prompt="hi"),
            line("long", prompt="much too long"),
            line("bad", model="nothing"),
        ]
        lines += [line("wrong", max_tokens=-1)]
        batch = await started(client, jsonl(*lines).rstrip(b"\n"))  # the last line has no line break
        done = await reached(gw, client, batch.id, "completed")
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 3)
        assert [one["custom_id"] for one in await lines_of(client, done.output_file_id)] == ["good"]
        errors = {one["custom_id"]: one["response"] for one in await lines_of(client, done.error_file_id)}
        assert {name: answer["status_code"] for name, answer in errors.items()} == {
            "long": 500,
            "bad": 404,
            "wrong": 400,
        }
        assert errors["bad"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("content", "code", "at"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"{", "invalid_json_line", 1),
        (jsonl(line("a"), line("a")), "duplicate_custom_id", 2),
        (jsonl(line("a", url=CHAT)), "invalid_url", 1),
        (jsonl(line("a", method="GET")), "invalid_method", 1),
        (jsonl(line("a", stream=True)), "stream_not_supported", 1),
        (jsonl({"custom_id": "a"}), "invalid_request", 1),
        (jsonl(*[line(f"{n}") for n in range(12)]), "too_many_requests", None),
        (jsonl(line("a", prompt="x" * 3000)), "line_too_long", 1),
    ],
)
async def test_a_file_that_is_not_valid_fails_its_batch(content: bytes, code: str, at: int | None) -> None:
    async with serving(batch_lines=10, body_bytes=2000) as (gw, client):
        batch = await started(client, content)
        failed = await reached(gw, client, batch.id, "failed")
        assert failed.errors is not None and failed.errors.data is not None
        assert (failed.errors.data[0].code, failed.errors.data[0].line) == (code, at)
        assert gw.dispatcher.calls == [] and failed.output_file_id is None
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)


async def test_a_batch_that_is_cancelled_ends_with_what_it_has() -> None:
    ended = asyncio.Event()

    async def some_end(call: FunctionCall) -> AsyncIterator[Event]:
        assert isinstance(call.work, Generate)
        if len(call.work.prompt_ids) > 3:
            yield HOT
            await asyncio.Event().wait()
        async for event in FakeDispatcher().script(call):
            if isinstance(event, RequestUsage):
                ended.set()
            yield event

    async with serving(some_end, at_once=4) as (gw, client):
        lines = [line("short", prompt="hi")] + [line(f"{n}", prompt="stays open") for n in range(100)]
        batch = await started(client, jsonl(*lines))
        await gw.dispatcher.until(lambda: len(gw.dispatcher.calls) >= 4)
        await ended.wait()
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        done = await reached(gw, client, batch.id, "cancelled")
        assert [one["custom_id"] for one in await lines_of(client, done.output_file_id)] == ["short"]
        cancelled = await lines_of(client, done.error_file_id)
        assert {one["error"]["code"] for one in cancelled} == {"batch_cancelled"}
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        await gw.dispatcher.until(lambda: not gw.dispatcher.open)
        bills, _ = await gw.state.requests(UsageFilter())
        assert len({bill.request_id for bill in bills}) == len(bills) == len(gw.dispatcher.calls)


async def test_a_batch_out_of_time_ends_with_what_it_has() -> None:
    async def never(_: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        await asyncio.Event().wait()

    async with serving(never, expire_s=0.3) as (gw, client):
        batch = await started(client, jsonl(*[line(f"{n}") for n in range(100)]))
        expired = await reached(gw, client, batch.id, "expired")
        assert expired.output_file_id is None and expired.request_counts is not None
        assert expired.request_counts.completed == 0 and expired.expired_at


async def test_a_queue_without_room_delays_the_lines() -> None:
    async with serving(jobs=20, at_once=2) as (gw, client):
        batch = await started(client, jsonl(*[line(f"{n}") for n in range(100)]))
        done = await reached(gw, client, batch.id, "completed")
        assert done.request_counts is not None and done.request_counts.completed == 100


async def test_embeddings_and_chat_are_endpoints_and_others_are_not() -> None:
    async with serving() as (gw, client):
        message = [{"role": "user", "content": "hi"}]
        asked = line("a", url=CHAT, messages=message)
        asked["body"].pop("prompt")
        batch = await started(client, jsonl(asked), endpoint=CHAT)
        done = await reached(gw, client, batch.id, "completed")
        (result,) = await lines_of(client, done.output_file_id or done.error_file_id)
        assert result["response"]["status_code"] in (200, 400)  # this model may have no template
        file = await client.files.create(file=("a", b"x"), purpose="user_data")
        for more in ({"endpoint": "/v1/moderations"}, {"completion_window": "1h"}, {}):
            given: Any = {"endpoint": CHAT, "completion_window": "24h", **more}
            with pytest.raises(openai.BadRequestError):
                await client.batches.create(input_file_id=file.id, **given)
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve("batch_" + "0" * 24)


async def test_another_gateway_carries_a_batch_on() -> None:
    """The first ends in the middle; what has ended stays, nothing runs twice."""
    state = MemoryState()
    ran: list[str] = []

    async def stops(call: FunctionCall) -> AsyncIterator[Event]:
        if len(ran) >= 50:
            yield HOT
            await asyncio.Event().wait()
        async for event in FakeDispatcher().script(call):
            if isinstance(event, RequestUsage):
                ran.append(call.request_id)
            yield event

    async with serving(stops, state, lease_s=3600) as (gw, client):
        batch = await started(client, jsonl(*[line(f"{n}") for n in range(120)]))
        await gw.dispatcher.until(lambda: len(gw.dispatcher.open) >= 24 and len(ran) >= 50)
        blobs = gw.blobs.blobs
    async with gateway(state=state, jobs=JobSettings(lease_s=3600)) as gw:
        gw.blobs.blobs.update(blobs)
        key = new_api_key("acme", KeyRole.CALLER, "again")
        await state.put_key(key.key)
        await gw.cluster.refresh()
        client = gw.openai(key.plaintext)
        done = await reached(gw, client, batch.id, "completed")
        results = await lines_of(client, done.output_file_id)
        assert sorted(int(one["custom_id"]) for one in results) == list(range(120))
        bills, _ = await state.requests(UsageFilter())
        assert len(bills) == 120
