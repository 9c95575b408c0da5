"""Calls that run later: their life as clients see it, their bill, cancellation, and bounds."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import msgspec
import pytest

from gateway.core.contract import DispatchError, Event, FunctionCall
from gateway.core.settings import JobSettings
from gateway.fakes.dispatcher import HOT
from gateway.jobs.predictions import iso_time
from registry.config.secrets import new_api_key
from registry.memory.state import MemoryState
from registry.messages.node import HandlerChunk, InvokeHandler, RequestUsage
from registry.records.api_key import KeyRole
from registry.records.function import FunctionTask
from registry.records.job import JobClaims, JobOutcome
from registry.records.usage import RequestRecord, RequestStatus
from registry.state import UsageFilter
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S

ASYNC = {"prefer": "respond-async"}
USAGE = RequestUsage(prompt_tokens=0, completion_tokens=0, gpu_us=3000, exec_us=3000)


async def echo(call: FunctionCall) -> AsyncIterator[Event]:
    assert isinstance(call.work, InvokeHandler)
    yield HOT
    yield HandlerChunk(data=call.work.body)
    yield USAGE


class Held:
    """A script whose calls wait until they are let go, and then echo."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, call: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        await self.go.wait()
        async for event in echo(call):
            yield event


@asynccontextmanager
async def serving(
    script: Any = echo, state: MemoryState | None = None, **jobs: Any
) -> AsyncIterator[tuple[Gateway, httpx2.AsyncClient]]:
    async with gateway(state=state, jobs=JobSettings(**jobs)) as gw, gw.http(gw.caller_key) as http:
        await gw.add_function("echo", FunctionTask.HANDLER)
        gw.dispatcher.script = script
        yield gw, http


def call(**more: Any) -> dict[str, Any]:
    return {"model": "echo", "input": {"n": 1}, **more}


async def ended(http: httpx2.AsyncClient, name: str) -> dict[str, Any]:
    """Return a prediction once it has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await http.get(f"/predictions/{name}", headers={"prefer": "wait"})
            if (found := answer.json())["completed_at"] is not None:
                return dict(found)


async def bills(gw: Gateway) -> list[RequestRecord]:
    return (await gw.state.requests(UsageFilter()))[0]


async def test_a_call_that_is_waited_for_answers_with_its_result() -> None:
    async with serving() as (gw, http):
        answer = await http.post("/predictions", json=call())
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["status"], body["input"], body["output"]) == ("succeeded", {"n": 1}, {"n": 1})
        assert body["error"] is None and body["webhook"] is None and body["version"] == 1
        assert body["urls"]["get"] == f"/predictions/{body['id']}"
        assert body["created_at"] <= body["started_at"] <= body["completed_at"]
        (bill,) = await bills(gw)
        assert (bill.request_id, bill.status, bill.tenant) == (body["request_id"], RequestStatus.OK, "acme")
        assert bill.billed_gpu_ms == 3
        assert [use.exact for use in gw.settled] == [True]
        assert await ended(http, body["id"]) == body
        assert [one.background for one in gw.dispatcher.calls] == [True]


async def test_a_call_is_accepted_at_once_and_read_later() -> None:
    held = Held()
    async with serving(held) as (gw, http):
        answer = await http.post("/predictions", json=call(), headers=ASYNC)
        assert answer.status_code == 202
        body = answer.json()
        assert body["status"] in ("starting", "processing") and body["output"] is None
        await gw.dispatcher.until(lambda: bool(gw.dispatcher.open))
        running = (await http.get(f"/predictions/{body['id']}")).json()
        assert running["status"] == "processing" and running["started_at"] is not None
        assert await bills(gw) == []
        held.go.set()
        assert (await ended(http, body["id"]))["output"] == {"n": 1}
        assert len(await bills(gw)) == 1


async def test_a_tenant_lists_its_own_without_input_and_output() -> None:
    async with serving() as (gw, http):
        for index in range(3):
            put = await http.put(f"/predictions/p{index}", json=call())
            assert put.status_code == 200
        first = (await http.get("/predictions", params={"limit": 2})).json()
        assert [one["id"] for one in first["data"]] == ["p2", "p1"] and first["has_more"]
        assert first["last_id"] == "p1" and first["data"][0]["status"] == "succeeded"
        assert not {"input", "output"} & first["data"][0].keys()
        rest = (await http.get("/predictions", params={"after": "p1"})).json()
        assert [one["id"] for one in rest["data"]] == ["p0"] and not rest["has_more"]
        refused = await http.get("/predictions", params={"after": "nothing"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "after")
        async with gw.http() as other:
            assert (await other.get("/predictions")).json()["data"] == []


async def test_what_waits_is_counted_in_the_metrics() -> None:
    held = Held()
    async with serving(held, at_once=1) as (gw, http), gw.http() as operator:

        async def metrics() -> str:
            return (await operator.get("/metrics")).text

        for name in ("a", "b"):
            await http.put(f"/predictions/{name}", json=call(), headers=ASYNC)
        async with asyncio.timeout(PATIENCE_S):
            while 'state="running"} 1.0' not in await metrics():
                await http.get("/predictions/a", headers={"prefer": "wait=1"})
        text = await metrics()
        assert 'hypercast_jobs{kind="prediction",state="queued"} 1.0' in text
        assert 'hypercast_batches{state="validating"} 0.0' in text
        (oldest,) = re.findall(r"\nhypercast_oldest_queued_job_seconds (\S+)", text)
        assert 0 <= float(oldest) < PATIENCE_S
        held.go.set()
        await ended(http, "b")
        text = await metrics()
        assert 'hypercast_jobs{kind="prediction",state="succeeded"} 2.0' in text
        assert "hypercast_oldest_queued_job_seconds 0.0" in text


async def test_the_wait_for_a_result_is_bounded_by_the_client() -> None:
    async with serving(Held()) as (_, http):
        answer = await http.post("/predictions", json=call(), headers={"prefer": "wait=0"})
        assert (answer.status_code, answer.json()["output"]) == (202, None)


async def test_an_id_of_the_client_makes_a_repetition_harmless() -> None:
    async with serving() as (gw, http):
        first = await http.put("/predictions/mine-1", json=call())
        again = await http.put("/predictions/mine-1", json=call())
        assert (first.status_code, again.status_code) == (200, 200)
        assert first.json() == again.json() and first.json()["id"] == "mine-1"
        assert len(gw.dispatcher.calls) == len(await bills(gw)) == 1
        other = await http.put("/predictions/mine-1", json=call(input={"n": 2}))
        assert other.status_code == 409
        stranger = new_api_key("beta", KeyRole.CALLER, "stranger")
        await gw.state.put_key(stranger.key)
        async with gw.http(stranger.plaintext) as beta:
            assert (await beta.get("/predictions/mine-1")).status_code == 404
            assert (await beta.post("/predictions/mine-1/cancel")).status_code == 404
            theirs = await beta.put("/predictions/mine-1", json=call(input={"n": 3}))
            assert theirs.json()["output"] == {"n": 3}
        assert (await http.get("/predictions/mine-1")).json() == first.json()


async def test_a_running_call_is_cancelled_and_billed_for_what_it_used() -> None:
    async with serving(Held()) as (gw, http):
        name = (await http.post("/predictions", json=call(), headers=ASYNC)).json()["id"]
        await gw.dispatcher.until(lambda: bool(gw.dispatcher.open))
        answer = await http.post(f"/predictions/{name}/cancel")
        assert answer.status_code == 200
        over = await ended(http, name)
        assert (over["status"], over["output"], over["error"]) == ("canceled", None, None)
        await gw.dispatcher.until(lambda: not gw.dispatcher.open)
        (bill,) = await bills(gw)
        assert (bill.status, bill.request_id) == (RequestStatus.CANCELLED, over["request_id"])
        again = await http.post(f"/predictions/{name}/cancel")
        assert again.json() == over


async def test_a_waiting_call_is_cancelled_without_a_run() -> None:
    held = Held()
    async with serving(held, at_once=1) as (gw, http):
        first = (await http.post("/predictions", json=call(), headers=ASYNC)).json()["id"]
        await gw.dispatcher.until(lambda: bool(gw.dispatcher.open))
        second = (await http.post("/predictions", json=call(), headers=ASYNC)).json()["id"]
        assert (await http.post(f"/predictions/{second}/cancel")).json()["status"] == "canceled"
        held.go.set()
        assert (await ended(http, first))["status"] == "succeeded"
        assert len(gw.dispatcher.calls) == len(await bills(gw)) == 1


async def test_a_failure_of_the_function_is_the_result_and_costs_nothing() -> None:
    async def broken(_: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        raise DispatchError("function_error", "no luck", status=500)

    async with serving(broken) as (gw, http):
        body = (await http.post("/predictions", json=call())).json()
        assert body["status"] == "failed" and body["output"] is None
        assert body["error"] == {
            "message": "no luck",
            "type": "server_error",
            "param": None,
            "code": "function_error",
        }
        (bill,) = await bills(gw)
        assert (bill.status, bill.cost_nanos) == (RequestStatus.FAILED, 0)


async def test_what_is_overloaded_is_tried_again_under_the_same_bill() -> None:
    tries: list[str] = []

    async def busy_first(one: FunctionCall) -> AsyncIterator[Event]:
        tries.append(one.request_id)
        yield HOT
        if len(tries) < 3:
            raise DispatchError("overloaded", "busy", status=503, retry_after_s=0)
        async for event in echo(one):
            yield event

    async with serving(busy_first) as (gw, http):
        body = (await http.post("/predictions", json=call())).json()
        assert body["output"] == {"n": 1}
        name = body["request_id"]
        assert tries == [f"{name}/1.0", f"{name}/2.0", f"{name}/3.0"]  # distinct for nodes
        (bill,) = await bills(gw)
        assert [part.call_id for part in bill.gpu] == [f"{name}/3.0"]


async def test_events_of_a_handler_are_a_list() -> None:
    async def stream(_: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        yield HandlerChunk(data=b'{"n":1}', stream=True)
        yield HandlerChunk(data=b'"data: two"', stream=True)
        yield USAGE

    async with serving(stream) as (_, http):
        assert (await http.post("/predictions", json=call())).json()["output"] == [{"n": 1}, "data: two"]


async def test_a_model_is_called_like_a_handler() -> None:
    async with serving() as (gw, http):
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.dispatcher.script = type(gw.dispatcher)().script
        asked = {"model": "coder:1", "input": {"prompt": "hello", "max_tokens": 3, "stream": True}}
        streamed = (await http.post("/predictions", json=asked)).json()
        assert streamed["status"] == "succeeded", streamed
        assert [chunk["object"] for chunk in streamed["output"]] == ["text_completion"] * len(
            streamed["output"]
        )
        asked["input"].pop("stream")
        whole = (await http.post("/predictions", json=asked)).json()
        assert whole["output"]["usage"]["completion_tokens"] == 3
        wrong = (await http.post("/predictions", json={"model": "coder", "input": {"max_tokens": 3}})).json()
        assert wrong["status"] == "failed" and wrong["error"]["type"] == "invalid_request_error"


async def test_results_over_the_limit_fail_without_a_price() -> None:
    async with serving(result_bytes=100) as (gw, http):
        body = (await http.post("/predictions", json=call(input={"text": "x" * 200}))).json()
        assert (body["status"], body["error"]["code"]) == ("failed", "result_too_large")
        (bill,) = await bills(gw)
        assert (bill.status, bill.cost_nanos, bill.billed_gpu_ms) == (RequestStatus.FAILED, 0, 3)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "nothing", "input": {}}, 404, "model"),
        ({"model": "echo"}, 422, "input"),
        ({"model": "echo", "input": [1]}, 422, "input"),
        ({"model": "../echo", "input": {}}, 422, "model"),
        ({"model": "echo", "input": {}, "webhook": "http://example.com/a"}, 422, "webhook"),
        ({"model": "echo", "input": {}, "webhook": "https://127.0.0.1/a"}, 422, "webhook"),
        ({"model": "echo", "input": {}, "webhook": "https://u:p@example.com/"}, 422, "webhook"),
        ({"model": "echo", "input": {}, "webhook_events_filter": ["start"]}, 422, "webhook_events_filter[0]"),
    ],
)
async def test_what_cannot_be_run_is_refused_at_once(body: dict[str, Any], status: int, param: str) -> None:
    async with serving() as (gw, http):
        answer = await http.post("/predictions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"] or "") == (status, param)
        assert (await http.get("/predictions/nothing")).status_code == 404
        assert (await http.get("/predictions/a%2Fb")).status_code == 404
        assert gw.dispatcher.calls == []


async def test_the_queue_is_bounded_for_a_tenant() -> None:
    async with serving(Held(), jobs=4) as (_, http):
        answers = [await http.post("/predictions", json=call(), headers=ASYNC) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]
        assert answers[2].json()["error"]["code"] == "queue_full"


async def test_limits_of_the_key_delay_its_calls() -> None:
    held = Held()
    async with serving(held) as (gw, http):
        (key,) = [key for key in await gw.state.keys() if key.tenant == "acme"]
        await gw.state.put_key(replace(key, max_concurrent=1))
        gw.services.auth.invalidate(key.id)
        names = [
            (await http.put(f"/predictions/p{i}", json=call(), headers=ASYNC)).json()["id"] for i in range(2)
        ]
        await gw.dispatcher.until(lambda: bool(gw.dispatcher.open))
        held.go.set()
        assert [(await ended(http, name))["status"] for name in names] == ["succeeded"] * 2
        assert len(await bills(gw)) == 2


async def test_a_revoked_key_runs_nothing() -> None:
    held = Held()
    async with serving(held, at_once=1) as (gw, http):
        await http.put("/predictions/first", json=call(), headers=ASYNC)
        await gw.dispatcher.until(lambda: bool(gw.dispatcher.open))
        await http.put("/predictions/second", json=call(), headers=ASYNC)
        (key,) = [key for key in await gw.state.keys() if key.tenant == "acme"]
        await gw.state.put_key(replace(key, revoked_at=1.0))
        held.go.set()
        fresh = new_api_key("acme", KeyRole.CALLER, "fresh")
        await gw.state.put_key(fresh.key)
        async with gw.http(fresh.plaintext) as mine:
            assert (await ended(mine, "first"))["status"] == "succeeded"
            second = await ended(mine, "second")
            assert (second["status"], second["error"]["type"]) == ("failed", "authentication_error")
        assert len(gw.dispatcher.calls) == 1


class Gated(MemoryState):
    """A state of which jobs are claimed while `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def claim_jobs(self, *args: Any, **more: Any) -> JobClaims:
        await self.gate.wait()
        return await super().claim_jobs(*args, **more)


async def test_a_gateway_that_stops_returns_what_it_runs() -> None:
    state = Gated()
    async with serving(Held(), state, lease_s=3600) as (gw, http):
        await http.put("/predictions/p", json=call(), headers=ASYNC)
        await gw.dispatcher.until(lambda: bool(gw.dispatcher.open))
        state.gate.clear()
    assert len(await bills(gw)) == 0
    async with serving(echo, state, lease_s=3600) as (gw, _):
        state.gate.set()
        admin = new_api_key("acme", KeyRole.CALLER, "again")
        await state.put_key(admin.key)
        async with gw.http(admin.plaintext) as http:
            assert (await ended(http, "p"))["output"] == {"n": 1}
        (bill,) = await bills(gw)
        assert [part.call_id.partition("/")[2] for part in bill.gpu] == ["2.0"]


class DiesBeforeTheBill(MemoryState):
    """A state whose first writer of a bill never comes back, as one that is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.dies = True
        self.results: list[tuple[str, JobOutcome]] = []

    async def finish_job(self, lease: Any, outcome: JobOutcome, *rest: Any, **more: Any) -> bool:
        self.results.append((lease.id, outcome))
        return await super().finish_job(lease, outcome, *rest, **more)

    async def add_request(self, record: RequestRecord) -> bool:
        if self.dies:
            self.dies = False
            await asyncio.Event().wait()
        return await super().add_request(record)


async def test_a_result_whose_gateway_died_before_the_bill_is_billed_by_the_next() -> None:
    state = DiesBeforeTheBill()
    async with serving(echo, state, lease_s=0.2) as (gw, http):
        runner_lease = state.renew_jobs

        async def none_renewed(leases: Any, *, ttl_s: float) -> Any:
            return await runner_lease([], ttl_s=ttl_s)

        state.renew_jobs = none_renewed  # type: ignore[method-assign]
        body = (await http.post("/predictions", json=call())).json()
        assert body["output"] == {"n": 1}
        assert len(gw.dispatcher.calls) == len(state.results) == 1  # it ran once
        (bill,) = await bills(gw)
        assert bill.request_id == body["request_id"]


def test_the_shown_times_are_exact() -> None:
    assert iso_time(1_700_000_000.25) == "2023-11-14T22:13:20.250Z"
    assert json.loads(msgspec.json.encode(iso_time(0.0))) == "1970-01-01T00:00:00.000Z"
