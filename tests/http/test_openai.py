"""The official openai client against the gateway's HTTP side, over a scripted dispatcher."""

import asyncio
from array import array
from collections.abc import AsyncIterator

import openai
import pytest

from gateway.core.contract import Event, FunctionCall
from gateway.fakes.dispatcher import HOT
from registry.messages.node import Array, Arrays, Compute, Generate, RequestUsage, Tokens
from registry.messages.sampling import TokenLogprob
from registry.records.function import FunctionTask
from registry.records.usage import RequestStatus
from registry.state import UsageFilter
from tests.fixtures.gateway_http import EOS, byte_tokenizer, gateway, tokenizer_with_bos
from tests.fixtures.patience import PATIENCE_S


def say(*texts: str, finish: str = "stop", logprob: float | None = None) -> object:
    """Yield a script that generates these texts' ids, one message each."""
    tokenizer = byte_tokenizer()

    async def script(call: FunctionCall) -> AsyncIterator[Event]:
        work = call.work
        assert isinstance(work, Generate)
        yield HOT
        sent = 0
        for index, text in enumerate(texts):
            ids = tuple(tokenizer.encode(text).ids)
            sent += len(ids)
            logprobs = () if logprob is None else tuple(TokenLogprob(logprob, ((i, logprob),)) for i in ids)
            reason = finish if index == len(texts) - 1 else ""
            yield Tokens(ids=ids, finish_reason=reason, gpu_us=1500 * (index + 1), logprobs=logprobs)
        yield RequestUsage(
            prompt_tokens=len(work.prompt_ids),
            completion_tokens=sent,
            gpu_us=1500 * len(texts),
            exec_us=5000,
        )

    return script


async def test_models() -> None:
    async with gateway() as gw:
        await gw.add_function("coder")
        client = gw.openai()
        assert [model.id async for model in client.models.list()] == ["coder"]
        assert (await client.models.retrieve("coder:1")).id == "coder:1"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("coder:2")
        assert caught.value.code == "model_not_found"


async def test_completion_of_token_ids_and_its_bill() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer(), vocab_size=300)
        raw = await gw.openai().completions.with_raw_response.create(
            model="coder",
            prompt=[10, 11, 12],
            max_tokens=5,
            extra_body={"return_token_ids": True, "ignore_eos": True, "some_future_field": 1},
        )
        answer = raw.parse()
        assert answer.choices[0].token_ids == [10, 11, 12, 10, 11]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == 5
        assert raw.headers["x-start-kind"] == "hot"
        assert raw.headers["x-function-version"] == "1"
        assert "exec;dur=1.0" in raw.headers["server-timing"]
        work = gw.dispatcher.works()[0]
        assert isinstance(work, Generate) and work.sampling.ignore_eos
        record = await gw.state.request(raw.headers["x-request-id"])
        assert (record.tenant, record.function, record.status) == ("acme", "coder", RequestStatus.OK)
        assert (record.prompt_tokens, record.completion_tokens) == (3, 5)
        assert record.billed_gpu_ms == 1 and record.cost_nanos == 200 + 50
        assert record.rate_id == "cpu-001"


async def test_chat_whole() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=tokenizer_with_bos())
        gw.dispatcher.script = say("hé", "llo", EOS)
        answer = await gw.openai().chat.completions.create(
            model="coder", messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        )
        choice = answer.choices[0]
        assert answer.object == "chat.completion"
        assert (choice.message.role, choice.message.content) == ("assistant", "héllo")
        assert choice.finish_reason == "stop"
        work = gw.dispatcher.works()[0]
        assert isinstance(work, Generate)
        # The default template, without the post-processor's own begin token.
        assert byte_tokenizer().decode(list(work.prompt_ids)) == "user: x\nassistant:"
        assert work.sampling.max_tokens == 256 - len(work.prompt_ids)


async def test_completion_adds_the_begin_token() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=tokenizer_with_bos())
        await gw.openai().completions.create(model="coder", prompt="hey", max_tokens=1)
        work = gw.dispatcher.works()[0]
        assert isinstance(work, Generate)
        assert work.prompt_ids == tuple(tokenizer_with_bos().encode("hey").ids)
        assert work.prompt_ids[0] == tokenizer_with_bos().token_to_id("<s>")


@pytest.mark.parametrize("include_usage", [True, False])
async def test_chat_stream(include_usage: bool) -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.dispatcher.script = say("one ", "two ", "three", finish="length")
        stream = await gw.openai().chat.completions.create(
            model="coder",
            messages=[{"role": "user", "content": "count"}],
            stream=True,
            stream_options={"include_usage": include_usage},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "one two three"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        if include_usage:
            assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == len(text)
            assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-1].hypercast["x_start_kind"] == "hot"
        assert stream.response.headers["x-start-kind"] == "hot"
        request_id = stream.response.headers["x-request-id"]
        assert (await gw.state.request(request_id)).status is RequestStatus.OK


async def test_the_first_token_of_a_stream_is_told_though_it_is_a_part_of_a_character() -> None:
    reported = asyncio.Event()

    async def script(call: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        first, *others = byte_tokenizer().encode("éa").ids
        yield Tokens(ids=(first,), finish_reason="", gpu_us=1, logprobs=())
        await asyncio.wait_for(reported.wait(), PATIENCE_S)
        yield Tokens(ids=tuple(others), finish_reason="length", gpu_us=1, logprobs=())
        yield RequestUsage(prompt_tokens=1, completion_tokens=3, gpu_us=1, exec_us=1)

    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.dispatcher.script = script
        stream = await gw.openai().completions.create(model="coder", prompt=[5], stream=True)
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
            reported.set()
        assert texts == ["", "éa", ""]


@pytest.mark.parametrize("wanted", [True, False])
async def test_token_ids_are_in_every_chunk_or_none(wanted: bool) -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        client, extra = gw.openai(), {"return_token_ids": wanted}
        options = {"include_usage": True}
        completion = await client.completions.create(
            model="coder", prompt=[5, 6], max_tokens=3, stream=True, stream_options=options, extra_body=extra
        )
        chat = await client.chat.completions.create(
            model="coder",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=3,
            stream=True,
            stream_options=options,
            extra_body=extra,
        )
        for stream in (completion, chat):
            choices = [choice async for chunk in stream for choice in chunk.choices]
            assert len(choices) >= 4 and all(hasattr(c, "token_ids") == wanted for c in choices)
            if wanted:
                assert len([token for c in choices for token in c.token_ids]) == 3


async def test_several_prompts_and_choices() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        client = gw.openai()
        answer = await client.completions.create(
            model="coder", prompt=[[5, 6], [7, 8]], n=2, max_tokens=3, seed=9
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == 12
        seeds = [w.sampling.seed for w in gw.dispatcher.works() if isinstance(w, Generate)]
        assert sorted(seeds) == [9, 10, 11, 12]
        stream = await client.completions.create(
            model="coder", prompt=["ab", "cd"], max_tokens=4, stream=True
        )
        texts = ["", ""]
        finished = []
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            if choice.finish_reason:
                finished.append(choice.index)
        assert texts == ["abab", "cdcd"]
        assert sorted(finished) == [0, 1]
        rows = await gw.state.report(UsageFilter())
        assert [row.requests for row in rows] == [2]


async def test_logprobs_of_both_shapes() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.dispatcher.script = say("ab", finish="length", logprob=-0.5)
        client = gw.openai()
        old = (await client.completions.create(model="coder", prompt="x", logprobs=1)).choices[0].logprobs
        assert old.tokens == ["a", "b"] and old.token_logprobs == [-0.5, -0.5]
        assert old.top_logprobs[0] == {"a": -0.5} and old.text_offset == [0, 1]
        chat = await client.chat.completions.create(
            model="coder", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1
        )
        entry = chat.choices[0].logprobs.content[1]
        assert (entry.token, entry.bytes, entry.top_logprobs[0].token) == ("b", [98], "b")


async def test_a_stop_string_cancels_the_call_and_is_billed() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.dispatcher.script = say("one E", "N", "D two", " three", finish="length")
        raw = await gw.openai().completions.with_raw_response.create(
            model="coder", prompt="x", max_tokens=50, stop=["END"]
        )
        answer = raw.parse()
        assert answer.choices[0].text == "one "
        assert answer.choices[0].finish_reason == "stop"
        assert len(gw.dispatcher.left_early) == 1 and not gw.dispatcher.open
        record = await gw.state.request(raw.headers["x-request-id"])
        assert record.status is RequestStatus.OK
        assert record.completion_tokens == answer.usage.completion_tokens == 11
        assert record.billed_gpu_ms == 5  # the third message reported 4500 us


async def test_embeddings() -> None:
    async def encode(call: FunctionCall) -> AsyncIterator[Event]:
        work = call.work
        assert isinstance(work, Compute)
        yield HOT
        vectors = [float(value) for ids in work.token_ids for value in (len(ids), 3.0, 4.0)]
        data = array("f", vectors).tobytes()
        shape = (len(work.token_ids), 3)
        yield Arrays(arrays={"embeddings": Array(dtype="float32", shape=shape, data=data)})
        tokens = sum(map(len, work.token_ids))
        yield RequestUsage(prompt_tokens=tokens, completion_tokens=0, gpu_us=10, exec_us=20)

    async with gateway() as gw:
        await gw.add_function("embed", FunctionTask.EMBED, tokenizer=byte_tokenizer(), context_length=8)
        gw.dispatcher.script = encode
        client = gw.openai()
        # The client asks for base64 by itself and decodes it.
        many = await client.embeddings.create(model="embed", input=["a" * (i % 5 + 1) for i in range(70)])
        assert [item.index for item in many.data] == list(range(70))
        assert [item.embedding[0] for item in many.data] == [i % 5 + 1 for i in range(70)]
        assert len(gw.dispatcher.calls) == 3
        plain = await client.embeddings.create(model="embed", input=[1, 2], encoding_format="float")
        assert plain.data[0].embedding == [2.0, 3.0, 4.0] and plain.usage.prompt_tokens == 2
        short = await client.embeddings.create(
            model="embed", input="aaa", dimensions=2, encoding_format="float"
        )
        assert short.data[0].embedding == pytest.approx([3 / 18**0.5, 3 / 18**0.5])
        with pytest.raises(openai.BadRequestError, match="at most 3"):
            await client.embeddings.create(model="embed", input="a", dimensions=4)
        with pytest.raises(openai.BadRequestError, match="context"):
            await client.embeddings.create(model="embed", input="a" * 9)
