"""Bills of requests that lose their client, node or ledger, and of ids that are used twice."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from gateway.core.contract import Event, FunctionCall, WaitStage
from gateway.fakes.dispatcher import HOT
from registry.errors import StateUnavailable
from registry.memory.ledger import MemoryLedger
from registry.messages.node import RequestUsage, Tokens
from registry.records.usage import RequestRecord, RequestStatus
from registry.state import UsageFilter
from tests.fixtures.gateway_http import byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S


async def test_client_that_leaves_cancels_its_call_and_is_billed() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def endless(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            for index in range(3):
                yield Tokens(ids=(index,), gpu_us=1000 * (index + 1))
            await asyncio.Event().wait()

        gw.dispatcher.script = endless
        stream = await gw.openai().completions.create(model="coder", prompt="x", stream=True, max_tokens=200)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 3:
                break
        assert gw.dispatcher.open
        await stream.close()
        async with asyncio.timeout(PATIENCE_S):
            await gw.dispatcher.until(lambda: not gw.dispatcher.open)
            await gw.services.limiter.wait_idle(PATIENCE_S)
        record = await gw.state.request(stream.response.headers["x-request-id"])
        assert record.status is RequestStatus.CANCELLED
        assert (record.completion_tokens, record.billed_gpu_ms) == (3, 3)


async def test_a_whole_request_is_cancelled_too_when_its_client_leaves() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def hang(call: FunctionCall) -> AsyncIterator[Event]:
            yield WaitStage(stage="fetch", fraction=0.5)
            await asyncio.Event().wait()

        gw.dispatcher.script = hang
        request = asyncio.create_task(gw.openai().completions.create(model="coder", prompt="x"))
        async with asyncio.timeout(PATIENCE_S):
            await gw.dispatcher.until(lambda: bool(gw.dispatcher.open))
            request.cancel()
            await gw.dispatcher.until(lambda: not gw.dispatcher.open)
        assert not await gw.state.report(UsageFilter())  # no instance had taken it
        with pytest.raises(asyncio.CancelledError):
            await request


async def test_client_request_ids_are_kept_and_each_use_is_billed() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        client = gw.openai()
        for _ in range(2):
            raw = await client.completions.with_raw_response.create(
                model="coder", prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-1"}
            )
            assert raw.headers["x-request-id"] == "mine-1"
        strange = await client.models.with_raw_response.list(extra_headers={"x-request-id": "a b/c"})
        assert strange.headers["x-request-id"].startswith("req-")
        assert (await gw.state.report(UsageFilter()))[0].requests == 2
        records = await gw.state.requests_by_client_id("mine-1")
        assert len({record.request_id for record in records}) == 2
        async with gw.http() as http:
            for request_id in ("mine-1", records[1].request_id):
                shown = (await http.get(f"/admin/usage/show/{request_id}")).json()
                assert (shown["request_id"], shown["client_request_id"]) == (records[1].request_id, "mine-1")
            found = await http.get(f"/admin/usage/show/{records[0].request_id}")
            assert found.json()["request_id"] == records[0].request_id
        assert len({call.request_id for call in gw.dispatcher.calls}) == 2


class DeafLedger(MemoryLedger):
    """A ledger that does not answer the first writes; if `lost`, they reach it nevertheless."""

    def __init__(self, refusals: int, *, lost: bool) -> None:
        super().__init__()
        self._refusals = refusals
        self._arrive = lost

    async def add_request(self, record: RequestRecord) -> bool:
        if self._refusals:
            self._refusals -= 1
            if self._arrive:
                await super().add_request(record)
            raise StateUnavailable("connection reset")
        return await super().add_request(record)


@pytest.mark.parametrize("lost", [True, False])
async def test_a_ledger_that_falters_bills_once(lost: bool) -> None:
    ledger = DeafLedger(2, lost=lost)
    async with gateway(ledger=ledger) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await gw.openai().completions.create(model="coder", prompt="x", max_tokens=1)
        assert (await ledger.report(UsageFilter()))[0].requests == 1


async def test_a_node_lost_before_its_usage_is_billed_by_its_last_token() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def lost(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            yield Tokens(ids=(1, 2), finish_reason="length", gpu_us=2500)
            yield RequestUsage(prompt_tokens=1, completion_tokens=2, gpu_us=0, exec_us=0)

        gw.dispatcher.script = lost
        raw = await gw.openai().completions.with_raw_response.create(model="coder", prompt="x")
        record = await gw.state.request(raw.headers["x-request-id"])
        assert (record.billed_gpu_ms, record.completion_tokens) == (3, 2)


async def test_nothing_begins_while_nothing_can_be_billed() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.services.health.report(alive=False, reason="test")
        with pytest.raises(openai.InternalServerError) as refused:
            await gw.openai().completions.create(model="coder", prompt="x")
        assert refused.value.status_code == 503 and refused.value.code == "state_unavailable"
        assert refused.value.response.headers["retry-after"]
        assert not gw.dispatcher.calls
