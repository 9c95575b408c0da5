"""Other protocols over a scripted dispatcher: failing streams, clients that leave, forms of errors."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from gateway.core.contract import DispatchError, Event, FunctionCall
from gateway.fakes.dispatcher import HOT
from registry.messages.node import Array, Arrays, Compute, RequestUsage, Tokens
from registry.records.function import FunctionTask
from registry.records.usage import RequestStatus
from registry.state import UsageFilter
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S

TURN: Any = [{"role": "user", "content": "x"}]


def claude(gw: Gateway) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gw.url, api_key=gw.caller_key, max_retries=0)


async def broken(call: FunctionCall) -> AsyncIterator[Event]:
    """Yield a token, then lose the node."""
    yield HOT
    yield Tokens(ids=(40,), gpu_us=1000)
    raise DispatchError("internal", "the node was lost", status=500)


async def endless(call: FunctionCall) -> AsyncIterator[Event]:
    """Yield three tokens, then nothing."""
    yield HOT
    for index in range(3):
        yield Tokens(ids=(40 + index,), gpu_us=1000 * (index + 1))
    await asyncio.Event().wait()


async def test_a_message_that_fails_within_its_stream_ends_with_an_error() -> None:
    async with gateway() as gw, claude(gw) as client:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.dispatcher.script = broken
        stream = await client.messages.create(model="coder", max_tokens=9, messages=TURN, stream=True)
        seen: list[str] = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            while True:
                seen.append((await anext(stream)).type)
        assert seen == ["message_start", "content_block_start", "content_block_delta"]
        body: Any = caught.value.body
        assert (body["type"], body["error"]) == (
            "error",
            {"type": "api_error", "message": "the node was lost"},
        )
        assert body["request_id"] == stream.response.headers["x-request-id"]


async def test_a_response_that_fails_within_its_stream_is_shown_as_failed() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.dispatcher.script = broken
        stream = await gw.openai().responses.create(model="coder", input="x", stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        error, failed = events[-2:]
        assert error.message == failed.response.error.message == "the node was lost"
        assert (error.code, failed.response.status) == ("internal", "failed")
        assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_message_whose_client_leaves_frees_its_call(streamed: bool) -> None:
    async with gateway() as gw, claude(gw) as client:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.dispatcher.script = endless
        made = client.messages.create(model="coder", max_tokens=99, messages=TURN, stream=streamed)
        request = asyncio.create_task(made)  # type: ignore[arg-type]
        async with asyncio.timeout(PATIENCE_S):
            await gw.dispatcher.until(lambda: bool(gw.dispatcher.open))
            if streamed:
                stream: Any = await request
                kinds = [(await anext(stream)).type for _ in range(5)]
                assert kinds[2:] == ["content_block_delta"] * 3
                await stream.close()
            else:
                request.cancel()
            await gw.dispatcher.until(lambda: not gw.dispatcher.open)
            await gw.services.limiter.wait_idle(PATIENCE_S)
        (row,) = await gw.state.report(UsageFilter())
        assert (row.requests, row.completion_tokens) == (1, 3 if streamed else row.completion_tokens)
        if streamed:
            record = await gw.state.request(stream.response.headers["x-request-id"])
            assert (record.status, record.billed_gpu_ms) == (RequestStatus.CANCELLED, 3)


async def test_errors_have_the_form_of_the_protocol_of_their_path() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as http:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        for path, shape in (
            ("/v1/messages", {"type", "error", "request_id"}),
            ("/v1/messages/batches", {"type", "error", "request_id"}),
            ("/v2/models/nobody/infer", {"error"}),
            ("/v2/repository/index", {"error"}),
            ("/v1/responses", {"error"}),
            ("/v1/messagesx", {"error"}),
        ):
            response = await http.post(path, json={"model": "nobody"})
            assert response.status_code in (400, 404) and set(response.json()) == shape, path
            text = path.startswith("/v2")
            assert isinstance(response.json()["error"], str if text else dict)
        misspelt = await http.post(
            "/v1/messages", json={"model": "coder", "messages": TURN, "max_tokens": 1, "stop_sequence": []}
        )
        assert "did you mean stop_sequences" in misspelt.json()["error"]["message"]


async def test_a_key_in_x_api_key() -> None:
    async with gateway() as gw, httpx2.AsyncClient(base_url=gw.url, trust_env=False) as http:
        assert (await http.get("/v1/models", headers={"x-api-key": gw.caller_key})).status_code == 200
        for wrong in (
            {"x-api-key": "hc_a_b"},
            {"x-api-key": gw.caller_key, "authorization": "Bearer no"},
            {},
        ):
            assert (await http.get("/v1/models", headers=wrong)).status_code == 401


def text_input(*texts: bytes) -> triton.InferInput:
    given = triton.InferInput("text", [len(texts)], "BYTES")
    given.set_data_from_numpy(np.array(texts, dtype=np.object_))
    return given


def infer(gw: Gateway, timeout_s: float, *texts: bytes) -> np.ndarray:
    """Call in this thread; the client gives up after `timeout_s`."""
    address = gw.url.removeprefix("http://")
    key = {"authorization": f"Bearer {gw.caller_key}"}
    with triton.InferenceServerClient(url=address, network_timeout=timeout_s) as client:
        return client.infer("embed", [text_input(*texts)], headers=key).as_numpy("embeddings")


async def embed_all(call: FunctionCall) -> AsyncIterator[Event]:
    """Yield a vector for each text: its number of tokens, and one."""
    work = call.work
    assert isinstance(work, Compute)
    yield HOT
    numbers = array("f", [one for ids in work.token_ids for one in (len(ids), 1)])
    shape = (len(work.token_ids), 2)
    yield Arrays(arrays={"embeddings": Array(dtype="float32", shape=shape, data=numbers.tobytes())})
    tokens = sum(map(len, work.token_ids))
    yield RequestUsage(prompt_tokens=tokens, completion_tokens=0, gpu_us=2000, exec_us=2000)


async def test_tensors_of_more_texts_than_one_call_takes_and_their_bill() -> None:
    async with gateway() as gw:
        await gw.add_function("embed", FunctionTask.EMBED, tokenizer=byte_tokenizer())
        gw.dispatcher.script = embed_all
        texts = [b"x" * (1 + index % 7) for index in range(70)]
        rows = await asyncio.to_thread(infer, gw, PATIENCE_S, *texts)
        assert rows.tolist() == [[len(text), 1] for text in texts]
        assert len(gw.dispatcher.calls) == 3
        (row,) = await gw.state.report(UsageFilter())
        assert (row.requests, row.prompt_tokens) == (1, sum(map(len, texts)))


async def test_an_infer_whose_client_leaves_frees_its_call() -> None:
    async with gateway() as gw:
        await gw.add_function("embed", FunctionTask.EMBED, tokenizer=byte_tokenizer())

        async def hang(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            await asyncio.Event().wait()

        gw.dispatcher.script = hang
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(infer, gw, 1.0, b"x")
        assert len(gw.dispatcher.calls) == 1
        async with asyncio.timeout(PATIENCE_S):
            await gw.dispatcher.until(lambda: not gw.dispatcher.open)


async def test_what_a_failing_node_says_reaches_the_client_of_tensors() -> None:
    async with gateway() as gw:
        await gw.add_function("embed", FunctionTask.EMBED, tokenizer=byte_tokenizer())

        async def fail(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            raise DispatchError("internal", "the node was lost", status=500)

        gw.dispatcher.script = fail
        with pytest.raises(InferenceServerException, match="the node was lost"):
            await asyncio.to_thread(infer, gw, PATIENCE_S, b"x")


@pytest.mark.parametrize(
    ("body", "header", "words"),
    [
        (b"{}", None, "inputs"),
        (b'{"inputs": []}', None, "inputs"),
        (b'{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES"}]}', None, "neither data"),
        (b'{"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["x"]}]}', None, "shape"),
        (b'{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [5]}]}', None, "texts"),
        (b'{"inputs": [{"name": "text", "shape": [0], "datatype": "BYTES", "data": []}]}', None, "1 to"),
        (b'{"inputs": [{"name": "text", "shape": [1], "datatype": "INT8", "data": [1]}]}', None, "BYTES"),
        (
            b'{"inputs": [{"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [1]}]}',
            None,
            "elements",
        ),
        (
            b'{"inputs": [{"name": "input_ids", "shape": [1, 1], "datatype": "INT64", "data": [99999]}]}',
            None,
            "token ids",
        ),
        (b"{}", "3", "length of the JSON"),
        (b"{}", "x", "length of the JSON"),
        (
            b'{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES",'
            b' "parameters": {"binary_data_size": 9}}]}',
            None,
            "not in the body",
        ),
    ],
)
async def test_tensors_that_cannot_be_used(body: bytes, header: str | None, words: str) -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as http:
        await gw.add_function("embed", FunctionTask.EMBED, tokenizer=byte_tokenizer(), vocab_size=300)
        headers = {} if header is None else {"inference-header-content-length": header}
        response = await http.post("/v2/models/embed/infer", content=body, headers=headers)
        assert response.status_code == 400 and words in response.json()["error"], response.text
        assert not gw.dispatcher.calls
