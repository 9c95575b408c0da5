"""What the official openai client sees when something goes wrong."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from gateway.core.contract import Assigned, DispatchError, Event, FunctionCall, WaitStage
from gateway.core.settings import StreamSettings
from gateway.fakes.dispatcher import HOT, repeat_prompt
from registry.messages.node import Tokens
from registry.records.function import FunctionTask
from registry.records.usage import RequestStatus
from registry.state import UsageFilter
from tests.fixtures.gateway_http import byte_tokenizer, gateway


async def test_error_classes() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await gw.add_function("ids")
        client = gw.openai()
        for key in ("hc_0123_" + "x" * 43, "nonsense"):
            with pytest.raises(openai.AuthenticationError) as refused:
                await gw.openai(key).models.list()
            assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="nobody", prompt="x")
        assert unknown.value.code == "model_not_found"
        for bad, param in (
            ({"max_tokens": "many"}, "max_tokens"),
            ({"temperature": 3.0}, "temperature"),
            ({"stop": [1]}, "stop"),
            ({"n": 0}, "n"),
            ({"prompt": [1, "a"]}, "prompt"),
            ({"prompt": []}, "prompt"),
        ):
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.completions.create(**{"model": "coder", "prompt": "x", **bad})
            assert wrong.value.param is not None and wrong.value.param.startswith(param)
            assert (wrong.value.type, wrong.value.code) == ("invalid_request_error", "invalid_value")
        with pytest.raises(openai.BadRequestError) as missing:
            await client.post("/chat/completions", body={"model": "coder"}, cast_to=object)
        assert missing.value.param == "messages"
        with pytest.raises(openai.BadRequestError) as role:
            await client.chat.completions.create(
                model="coder", messages=[{"role": "user", "content": "x"}, {"role": "nobody"}]
            )
        assert role.value.param == "messages[1].role"
        for bad in (
            {"prompt": [5] * 300},
            {"max_tokens": 300},
            {"echo": True, "logprobs": 1},
            {"prompt": [10**6]},
            {"model": "ids", "prompt": "text"},
        ):
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**{"model": "coder", "prompt": "x", **bad})
        for field, value in (("tool_choice", "required"), ("response_format", {"type": "structural_tag"})):
            with pytest.raises(openai.BadRequestError) as unsupported:
                await client.chat.completions.create(
                    model="coder", messages=[{"role": "user", "content": "x"}], **{field: value}
                )
            assert unsupported.value.param == field
        assert not gw.dispatcher.calls


async def test_an_invalid_value_is_a_400_below_v1_and_a_422_elsewhere() -> None:
    async with gateway() as gw, gw.http() as http:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await gw.add_function("embed", FunctionTask.EMBED, tokenizer=byte_tokenizer())
        for name, path, body in (
            ("coder", "/v1/completions", {"prompt": ""}),
            ("coder", "/v1/completions", {"prompt": "x", "n": 0}),
            ("coder", "/v1/chat/completions", {"messages": [{"role": "user"}]}),
            ("embed", "/v1/embeddings", {"input": ["a", ""]}),
            ("embed", "/v1/embeddings", {"input": ""}),
        ):
            answers = [
                await http.post(path, json=body | {"model": name}),
                await http.post(f"/functions/{name}/invoke", json=body),
            ]
            assert [answer.status_code for answer in answers] == [400, 422]
            assert answers[0].json() == answers[1].json()
        assert not gw.dispatcher.calls


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_dispatcher_refuses(stream: bool) -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def refuse(call: FunctionCall) -> AsyncIterator[Event]:
            raise DispatchError("rate_limited", "too many at once", status=429, retry_after_s=7)
            yield HOT

        gw.dispatcher.script = refuse
        with pytest.raises(openai.RateLimitError) as limited:
            await gw.openai().completions.create(model="coder", prompt="x", stream=stream)
        assert limited.value.response.headers["retry-after"] == "7"
        assert limited.value.code == "rate_limited"
        assert not await gw.state.report(UsageFilter())


async def test_a_failure_in_a_stream_is_an_event_and_costs_nothing() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def break_down(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            yield Tokens(ids=(1,), gpu_us=2000)
            raise DispatchError("function_error", "the engine broke", status=500)

        gw.dispatcher.script = break_down
        stream = await gw.openai().completions.create(model="coder", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="the engine broke"):
            [chunk async for chunk in stream]
        record = await gw.state.request(stream.response.headers["x-request-id"])
        assert record.status is RequestStatus.FAILED
        assert (record.billed_gpu_ms, record.cost_nanos) == (2, 0)


async def test_a_late_start_is_told_in_comments_and_the_last_chunk() -> None:
    streams = StreamSettings(head_wait_s=0.02, stage_every_s=0.0, keepalive_s=0.05)
    async with gateway(streams=streams) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        loading = asyncio.Event()

        async def start_cold(call: FunctionCall) -> AsyncIterator[Event]:
            yield WaitStage(stage="fetch", fraction=0.1)
            await loading.wait()
            yield WaitStage(stage="copy", fraction=0.62)
            yield Assigned(
                instance_id="i",
                node="n1",
                gpu_type="cpu",
                gpu_count=1,
                start_kind="cold",
                queue_ms=1.0,
                load_ms=70.0,
            )
            async for event in repeat_prompt(call):
                if not isinstance(event, Assigned):
                    yield event

        gw.dispatcher.script = start_cold
        body = {"model": "coder", "prompt": "ab", "max_tokens": 2, "stream": True}
        lines: list[str] = []
        async with gw.http(gw.caller_key) as http:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200 and "x-start-kind" not in response.headers
                async for line in response.aiter_lines():
                    lines.append(line)
                    if line == ": keepalive":
                        loading.set()
        assert lines[0] == ": stage=load 10%"
        assert ": stage=load 62%" in lines and ": start-kind=cold" in lines
        assert ": server-timing=queue;dur=1.0, load;dur=70.0" in lines
        assert '"x_start_kind":"cold"' in lines[-4] and lines[-2] == "data: [DONE]"
        assert (await gw.state.report(UsageFilter()))[0].requests == 1
        metrics = gw.services.metrics.render().decode()
        assert 'hypercast_cold_starts_total{function="coder"} 1.0' in metrics
        assert 'hypercast_held_requests{function="coder"} 0.0' in metrics
