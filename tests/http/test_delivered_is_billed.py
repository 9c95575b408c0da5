"""What was delivered is billed, and a spend limit holds for concurrent requests, too."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import openai
import pytest

from gateway.core.contract import Deadlines, DispatchError, Event, FunctionCall
from gateway.fakes.dispatcher import HOT, repeat_prompt
from registry.messages.node import RequestUsage, Tokens
from registry.records.api_key import SpendPeriod
from registry.records.function import FunctionTask
from registry.records.usage import PriceRate, RequestRecord, RequestStatus, cost_nanos
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S

RATE = PriceRate(
    id="cpu-002",
    gpu_type="cpu",
    gpu_second_nanos=1_000_000,
    request_nanos=100,
    prompt_mtoken_nanos=0,
    completion_mtoken_nanos=10_000_000,
)


async def set_price(gw: Gateway) -> None:
    await gw.state.put_rate(RATE)
    await gw.services.health.probe(rates=True)


async def the_record(gw: Gateway, client_request_id: str) -> RequestRecord:
    await gw.services.limiter.wait_idle(PATIENCE_S)
    (record,) = await gw.state.requests_by_client_id(client_request_id)
    return record


async def read(gw: Gateway, key: str, client_request_id: str, **ask: object) -> int:
    """Return the number of events with text of a stream; its failure is expected."""
    stream = await gw.openai(key).completions.create(
        model="coder", prompt="x", stream=True, extra_headers={"x-request-id": client_request_id}, **ask
    )
    events = 0
    with pytest.raises(openai.APIError):
        async for chunk in stream:
            events += bool(chunk.choices[0].text)
    return events


async def make_key(gw: Gateway, **limits: object) -> str:
    async with gw.http() as admin:
        made = await admin.post("/admin/keys", json={"tenant": "t", "role": "caller", "name": "k", **limits})
        assert made.status_code == 201, made.text
        return str(made.json()["key"])


async def endless(call: FunctionCall) -> AsyncIterator[Event]:
    yield HOT
    for count in range(1, 10**6):
        yield Tokens(ids=(5,), gpu_us=1000 * count)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("deadlines", [Deadlines(total_s=0.5), Deadlines(idle_s=0.3)])
async def test_a_stream_that_a_deadline_ends_is_billed_and_counts_in_the_limit(deadlines: Deadlines) -> None:
    async def stuck(call: FunctionCall) -> AsyncIterator[Event]:
        async for event in endless(call):
            yield event
            if getattr(event, "gpu_us", 0) >= 10_000 and deadlines.idle_s < 1:
                await asyncio.Event().wait()

    async with gateway(deadlines=deadlines) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer(), context_length=0)
        await set_price(gw)
        gw.dispatcher.script = stuck
        key = await make_key(gw, spend_limit_nanos=1, spend_period="total")
        events = await read(gw, key, "late", max_tokens=10**6)
        record = await the_record(gw, "late")
        assert (record.status, record.completion_tokens) == (RequestStatus.CANCELLED, events)
        assert record.cost_nanos == cost_nanos(RATE, record.billed_gpu_ms, 1, events) > 100
        with pytest.raises(openai.RateLimitError) as caught:
            await gw.openai(key).completions.create(model="coder", prompt="x")
        assert caught.value.code == "insufficient_quota"


async def test_a_whole_response_is_billed_if_it_overran_and_free_if_the_platform_failed() -> None:
    async def broken(call: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        yield Tokens(ids=(5,), gpu_us=1000)
        raise DispatchError("internal", "the node is lost", status=500)

    async with gateway(deadlines=Deadlines(total_s=0.3)) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer(), context_length=0)
        await set_price(gw)
        for name, script, status in (("over", endless, "cancelled"), ("broken", broken, "failed")):
            gw.dispatcher.script = script
            with pytest.raises(openai.APIStatusError):
                await gw.openai().completions.create(
                    model="coder", prompt="x", max_tokens=10**6, extra_headers={"x-request-id": name}
                )
            record = await the_record(gw, name)
            assert (record.status, record.cost_nanos > 0) == (status, status == "cancelled")


async def test_one_failed_choice_makes_the_others_of_a_stream_not_free() -> None:
    first_ended = asyncio.Event()

    async def one_fails(call: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        if call.request_id.endswith("/0"):
            for count in range(1, 6):
                yield Tokens(ids=(5,), gpu_us=1000 * count, finish_reason="length" if count == 5 else "")
            try:
                yield RequestUsage(prompt_tokens=1, completion_tokens=5, gpu_us=5000, exec_us=1)
            finally:
                first_ended.set()  # its usage has been taken
        else:
            yield Tokens(ids=(5,), gpu_us=7000)
            await first_ended.wait()
            raise DispatchError("internal", "the node is lost", status=500)

    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await set_price(gw)
        gw.dispatcher.script = one_fails
        await read(gw, gw.caller_key, "half", n=2, max_tokens=5)
        record = await the_record(gw, "half")
        assert (record.status, record.billed_gpu_ms) == (RequestStatus.CANCELLED, 12)
        assert record.cost_nanos == cost_nanos(RATE, 5, 1, 5)


async def test_parameters_are_checked_before_anything_is_computed() -> None:
    async with gateway() as gw:
        tokenizer = byte_tokenizer()
        await gw.add_function("embed", FunctionTask.EMBED, tokenizer=tokenizer, hidden_size=384)
        await gw.add_function("coder", tokenizer=tokenizer, context_length=100_000)
        client = gw.openai()
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            await client.embeddings.create(model="embed", input="x", dimensions=65_536)
        with pytest.raises(openai.BadRequestError, match="at most 97 tokens a choice"):
            await client.completions.create(model="coder", prompt="x", n=128, max_tokens=98, logprobs=20)
        with pytest.raises(openai.BadRequestError, match="at least") as caught:
            await client.embeddings.create(model="embed", input=["x", "y" * 100_000])
        assert caught.value.code == "context_length_exceeded"
        assert not gw.dispatcher.calls
        # A chat without max_tokens gets what the bound leaves.
        gw.dispatcher.script = repeat_prompt
        done = await client.chat.completions.create(
            model="coder",
            messages=[{"role": "user", "content": "x"}],
            n=100,
            logprobs=True,
            top_logprobs=20,
        )
        assert {choice.finish_reason for choice in done.choices} == {"length"}
        assert done.usage is not None and done.usage.completion_tokens == 100 * ((1 << 18) // 2100)


async def test_a_spend_limit_holds_for_concurrent_requests() -> None:
    each = cost_nanos(RATE, 1, 1, 10)

    answered, all_answered = Counter[str](), asyncio.Event()
    asked = 1

    def answer(kind: str) -> None:
        answered[kind] += 1
        if answered.total() >= asked:
            all_answered.set()

    async def slow(call: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        answer("begun")
        await all_answered.wait()  # each holds its reservation until all have been answered or begun
        yield Tokens(ids=(5,) * 10, finish_reason="length", gpu_us=500)
        yield RequestUsage(prompt_tokens=1, completion_tokens=10, gpu_us=500, exec_us=1)

    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await set_price(gw)
        gw.dispatcher.script = slow
        key = await make_key(gw, spend_limit_nanos=5 * each, spend_period="total")

        async def ask() -> str:
            try:
                await gw.openai(key).completions.create(model="coder", prompt="x", max_tokens=10)
            except openai.RateLimitError as error:
                answer("refused")
                return str(error.code)
            return "served"

        assert await ask() == "served"  # the estimate of its accelerator time is known from now on
        asked = 41
        all_answered.clear()
        outcomes = await asyncio.gather(*(ask() for _ in range(40)))
        assert set(outcomes) == {"served", "spend_limit_reserved"}
        assert 1 <= outcomes.count("served") <= 4
        while (outcome := await ask()) == "served":
            pass
        assert outcome == "insufficient_quota"
        assert 5 * each <= await gw.state.spent_nanos(key.split("_")[1], SpendPeriod.TOTAL, 0) <= 6 * each
