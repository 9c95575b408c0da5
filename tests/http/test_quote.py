"""POST /v1/quote: what a call would cost, before it runs, and what it cost then."""

import json

from registry.records.function import FunctionTask
from registry.records.usage import PriceRate
from registry.state import UsageFilter
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.registry_records import node

QUOTE = "/v1/quote"
BODY = {"model": "coder", "prompt": "hello", "max_tokens": 8}


async def set_price(gw: Gateway, gpu_second_nanos: int) -> None:
    rate = PriceRate(
        id="cpu-002",
        gpu_type="cpu",
        gpu_second_nanos=gpu_second_nanos,
        request_nanos=200,
        prompt_mtoken_nanos=1_500_000_001,
        completion_mtoken_nanos=7_000_000_003,
    )
    await gw.state.put_rate(rate)
    await gw.services.health.probe(rates=True)
    await gw.state.put_node(node(), ttl_s=60)
    await gw.cluster.refresh()


async def test_a_price_by_tokens_is_quoted_to_the_nano() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as caller:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await set_price(gw, gpu_second_nanos=0)
        chat = {"model": "coder", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        template = {"chat_template": "{{ messages[0].content }}"}
        await gw.add_function(
            "talker",
            tokenizer=byte_tokenizer(),
            files={"tokenizer_config.json": json.dumps(template).encode()},
        )
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/completions", {**BODY, "prompt": ["hello", "you"], "n": 3, "ignore_eos": True}),
            ("/v1/chat/completions", {**chat, "model": "talker"}),
        ):
            quote = (await caller.post(QUOTE, json=body)).json()
            assert not gw.dispatcher.open
            answer = await caller.post(path, json=body)
            assert answer.status_code == 200, answer.text
            record = await gw.state.request(answer.headers["x-request-id"])
            assert (quote["cost_nanos"], quote["rate"]) == (record.cost_nanos, record.rate_id)
            parts = {part["meter"]: part for part in quote["parts"]}
            assert parts["prompt-tokens"]["quantity"] == record.prompt_tokens
            assert parts["completion-tokens"]["quantity"] == record.completion_tokens
            assert sum(part["cost_nanos"] for part in quote["parts"]) == record.cost_nanos
            assert quote["cost"] == f"0.{record.cost_nanos:09}"


async def test_gpu_time_is_quoted_as_requests_took_it_of_late() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as caller:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await set_price(gw, gpu_second_nanos=50_000)
        before = (await caller.post(QUOTE, json=BODY)).json()
        assert (before["gpu_time"], before["gpu_type"]) == ("assumed", "cpu")
        answer = await caller.post("/v1/completions", json=BODY)
        record = await gw.state.request(answer.headers["x-request-id"])
        after = (await caller.post(QUOTE, json=BODY)).json()
        assert after["gpu_time"] == "measured"
        (gpu,) = [part for part in after["parts"] if part["meter"] == "gpu-time"]
        assert (gpu["quantity"], after["cost_nanos"]) == (record.billed_gpu_ms, record.cost_nanos)


async def test_a_quote_is_no_call() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as caller, gw.http() as admin:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        assert (await caller.post(QUOTE, json=BODY)).status_code == 200
        assert not gw.dispatcher.calls and not await gw.state.report(UsageFilter())
        metrics = (await admin.get("/metrics")).text
        assert 'hypercast_requests_total{code="200",function="coder"' not in metrics


async def test_what_a_call_would_refuse_a_quote_refuses() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as caller:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        for body, status, code in (
            ({"prompt": "x"}, 400, "invalid_value"),
            ({"model": "nobody", "prompt": "x"}, 404, "model_not_found"),
            ({"model": "coder", "input": "x"}, 400, "invalid_value"),
            ({**BODY, "prompt": "x" * 300}, 400, "context_length_exceeded"),
            ({**BODY, "temperature": 5}, 400, "invalid_value"),
        ):
            answer = await caller.post(QUOTE, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


async def test_other_tasks_are_quoted_by_what_they_count() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as caller:
        await set_price(gw, gpu_second_nanos=0)
        await gw.add_function("embed", FunctionTask.EMBED, tokenizer=byte_tokenizer())
        await gw.add_function("clip", FunctionTask.FEATURES, tokenizer=byte_tokenizer())
        await gw.add_function("echo", FunctionTask.HANDLER)
        await gw.add_function("vit", FunctionTask.CLASSIFY)
        for body, tokens in (
            ({"model": "embed", "input": ["hello", "you"]}, 4 + 3),
            ({"model": "clip", "text": "hello"}, 4),
            ({"model": "clip", "image": "aGk="}, 0),
            ({"model": "echo", "any": {"thing": 1}}, 0),
            ({"model": "vit", "image": "aGk="}, 0),
        ):
            quote = (await caller.post(QUOTE, json=body)).json()
            prompt = -(-1_500_000_001 * tokens // 1_000_000)
            assert quote["cost_nanos"] == 200 + prompt, quote
            assert [part["quantity"] for part in quote["parts"][:2]] == [1, tokens]
