"""What the official openai client sees when something goes wrong, and what of it is billed."""

import asyncio
import json
from collections.abc import AsyncIterator

import openai
import pytest

from gateway.core.contract import Assigned, DispatchError, Event, FunctionCall, WaitStage
from gateway.core.settings import StreamSettings
from gateway.fakes.dispatcher import HOT, repeat_prompt
from registry.errors import StateUnavailable
from registry.memory.ledger import MemoryLedger
from registry.messages.node import Generate, RequestUsage, Tokens
from registry.records.function import FunctionTask
from registry.records.usage import RequestRecord, RequestStatus
from registry.state import UsageFilter
from tests.fixtures.gateway_http import byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S


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


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"response_format": {"type": "json_object"}},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"choice": ["yes", 'n"o']}},
        {"guided_regex": "[a-f]+"},
        {"guided_grammar": 'root ::= "a" | "b"'},
        {"guided_grammar": 'start: "a" | "b"'},
    ],
)
async def test_a_grammar_reaches_the_node_with_its_tokenizer(fields: dict[str, object]) -> None:
    async with gateway() as gw:
        version = await gw.add_function("coder", tokenizer=byte_tokenizer(), eos_token_id=257)
        for extra in (fields, {}):
            await gw.openai().chat.completions.create(
                model="coder", messages=[{"role": "user", "content": "x"}], max_tokens=2, extra_body=extra
            )
        guided, free = (call.work.sampling for call in gw.dispatcher.calls)  # type: ignore[union-attr]
        assert guided.grammar and guided.tokenizer == version.assets["tokenizer.json"]
        assert (free.grammar, free.tokenizer) == ("", "")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "([0-9"}, "guided_regex", "unclosed character class"),
        ({"guided_json": {"type": "nope"}}, "guided_json", "nope"),
        ({"guided_json": "{"}, "guided_json", "guided_json: "),
        ({"guided_choice": []}, "guided_choice", "1 to 1024 texts"),
        ({"guided_choice": "a"}, "guided_choice", "1 to 1024 texts"),
        ({"guided_grammar": "start: ("}, "guided_grammar", "guided_grammar: "),
        ({"guided_grammar": 7}, "guided_grammar", "must be a text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "exclude each other"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "exclude each other"),
        ({"guided_choice": ["x" * 200_000]}, "guided_choice", "over 131072 bytes"),
    ],
)
async def test_a_grammar_that_is_none_is_refused(fields: dict[str, object], param: str, message: str) -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer(), eos_token_id=257)
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            await gw.openai().completions.create(model="coder", prompt="x", extra_body=fields)
        assert refused.value.param == param


async def test_a_function_without_a_tokenizer_follows_no_grammar() -> None:
    async with gateway() as gw:
        await gw.add_function("ids")
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            await gw.openai().completions.create(model="ids", prompt=[1, 2], extra_body={"guided_regex": "a"})


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [("temprature", 0.5, "temperature"), ("max_token", 3, "max_tokens"), ("stops", ["x"], "stop")],
)
async def test_a_misspelt_field_is_named(field: str, value: object, near: str) -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        with pytest.raises(openai.BadRequestError, match=f"did you mean {near}") as misspelt:
            await gw.openai().completions.create(model="coder", prompt="x", extra_body={field: value})
        assert (misspelt.value.code, misspelt.value.param) == ("unknown_parameter", field)
        unknown = {"store": False, "function_call": "none", "prompt_cache_key": "k", "safety_identifier": "s"}
        await gw.openai().completions.create(model="coder", prompt="x", max_tokens=1, extra_body=unknown)


async def test_sampling_fields_reach_the_node() -> None:
    fields = {"min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "allowed_token_ids": [3, 4]}
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        create = gw.openai().completions.create
        await create(
            model="coder",
            prompt="x",
            max_tokens=3,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={"7": 2},
            extra_body=fields,
        )
        (call,) = gw.dispatcher.calls
        sampling = call.work.sampling
        assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.1, 1.2, 2)
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
        assert (sampling.logit_bias, sampling.allowed_token_ids) == (((7, 2.0),), (3, 4))
        for wrong, param in (({"logit_bias": {"a": 1}}, "logit_bias"), ({"min_tokens": 9}, "min_tokens")):
            with pytest.raises(openai.BadRequestError) as refused:
                await create(model="coder", prompt="x", max_tokens=3, extra_body=wrong)
            assert refused.value.param == param


@pytest.mark.parametrize("prompt", ["ab", byte_tokenizer().encode("ab").ids, ["ab", "ab"]])
async def test_echo_puts_the_prompt_first(prompt: str | list[int] | list[str]) -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        create = gw.openai().completions.create
        plain = await create(model="coder", prompt=prompt, max_tokens=3, temperature=0)
        echoed = await create(model="coder", prompt=prompt, max_tokens=3, temperature=0, echo=True)
        assert [one.text for one in echoed.choices] == ["ab" + one.text for one in plain.choices]
        stream = await create(
            model="coder", prompt=prompt, max_tokens=3, temperature=0, echo=True, stream=True
        )
        texts: dict[int, str] = {}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        assert list(texts.values()) == [one.text for one in echoed.choices]
        with pytest.raises(openai.BadRequestError, match="echo with logprobs"):
            await create(model="coder", prompt=prompt, max_tokens=3, echo=True, logprobs=1)


async def test_bad_words_are_token_ids_at_the_node() -> None:
    async with gateway() as gw, gw.openai() as client:
        tokenizer = byte_tokenizer()
        await gw.add_function("coder", tokenizer=tokenizer)
        await client.completions.create(
            model="coder", prompt="x", max_tokens=1, extra_body={"bad_words": ["he", " x"]}
        )
        (work,) = gw.dispatcher.works()
        assert isinstance(work, Generate)
        he, x, spaced = (tuple(tokenizer.encode(word).ids) for word in ("he", "x", " x"))
        assert work.sampling.bad_words[:2] == (he, x) and len(spaced) == 2
        await gw.add_function("bare")
        with pytest.raises(openai.BadRequestError, match="bad_words need a function with a tokenizer"):
            await client.completions.create(
                model="bare", prompt=[1], max_tokens=1, extra_body={"bad_words": ["a"]}
            )


async def test_fields_that_are_not_implemented_are_refused_unless_without_effect() -> None:
    refused = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    refused |= {"prompt_logprobs": 0, "truncate_prompt_tokens": 3, "use_beam_search": True}
    refused |= {"structured_outputs": {"structural_tag": "x"}, "response_format": {"type": "structural_tag"}}
    of_chat = {"chat_template": "x", "add_generation_prompt": False, "modalities": ["audio"]}
    of_chat |= {
        "echo": True,
        "continue_final_message": True,
        "add_special_tokens": True,
    }
    harmless = {"repetition_penalty": 1, "min_p": 0, "bad_words": [], "skip_special_tokens": True}
    harmless |= {"guided_json": None, "modalities": ["text"], "user": "x", "store": True, "echo": False}
    messages = [{"role": "user", "content": "x"}]
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        client = gw.openai()
        for field, value in (refused | {"suffix": "x", "add_special_tokens": False}).items():
            with pytest.raises(openai.BadRequestError) as unsupported:
                await client.completions.create(model="coder", prompt="x", extra_body={field: value})
            assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", field)
        for field, value in (refused | of_chat).items():
            with pytest.raises(openai.BadRequestError) as unsupported:
                await client.chat.completions.create(
                    model="coder", messages=messages, extra_body={field: value}
                )
            assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", field)
        await client.completions.create(model="coder", prompt="x", max_tokens=2, extra_body=harmless)
        await client.chat.completions.create(
            model="coder",
            messages=messages,
            max_tokens=2,
            extra_body=harmless | {"tool_choice": "none", "add_special_tokens": False},
        )


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
