"""Text in and out of the gateway: detokenising, stop strings, chat templates, the bounds of JSON."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gateway.core.errors import ApiError, BadRequest, Unprocessable
from gateway.core.settings import JsonBounds, RequestLimits, parse
from gateway.http.limits import check_json, check_shape, decode
from gateway.inference.assets import parse_assets
from gateway.inference.chat_template import DEFAULT_TEMPLATE, ChatTemplate, template_source
from gateway.inference.detokenize import Detokenizer, StopStrings
from gateway.inference.tokenization import split_prompts
from gateway.schemas.admin import ScalingPatch
from gateway.schemas.functions import ClassifyRequest
from gateway.schemas.openai import ChatRequest, CompletionRequest
from registry.errors import InvalidRecord
from registry.records.function import Scaling, ScalingMode
from tests.fixtures.gateway_http import byte_tokenizer

BYTES = byte_tokenizer()


def fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: pieces with a marked space, and single bytes for what has no piece."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "▁a", "a", "b", "▁be", "é"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<0x00>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


FALLBACK = fallback_tokenizer()


@given(st.lists(st.integers(0, 256), max_size=40), st.data())
def test_streamed_bytes_equal_the_full_decode(ids: list[int], data: st.DataObject) -> None:
    prompt = data.draw(st.sampled_from([[], BYTES.encode("x = ").ids]))
    stream = Detokenizer(BYTES, prompt)
    text = "".join(stream.push([token]) for token in ids) + stream.finish()
    whole = BYTES.decode(prompt + ids)
    assert BYTES.decode(prompt) + text == whole


@given(st.text(max_size=20), st.text(max_size=20))
def test_streamed_text_is_the_text(prompt: str, text: str) -> None:
    stream = Detokenizer(BYTES, BYTES.encode(prompt).ids)
    parts = [stream.push([token]) for token in BYTES.encode(text).ids]
    assert "".join(parts) + stream.finish() == text
    assert (
        not any("\N{REPLACEMENT CHARACTER}" in part for part in parts) or "\N{REPLACEMENT CHARACTER}" in text
    )


def test_the_space_before_the_first_word_stays() -> None:
    prompt = [FALLBACK.token_to_id("▁be")]
    ids = [FALLBACK.token_to_id("▁a"), FALLBACK.token_to_id("b")]
    stream = Detokenizer(FALLBACK, prompt)
    assert [stream.push([token]) for token in ids] == [" a", "b"]


def test_a_broken_end_is_told_once() -> None:
    euro = list("€".encode())
    stream = Detokenizer(FALLBACK, [FALLBACK.token_to_id("a")])
    assert stream.push(euro[:2]) == ""
    assert set(stream.finish()) == {"\N{REPLACEMENT CHARACTER}"}
    assert stream.finish() == ""


def first_to_end(text: str, stops: list[str]) -> str:
    """Return the rule in one line: the text before the longest stop string that ends first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=300)
@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_cut_wherever_the_deltas_do(deltas: list[str], stops: list[str]) -> None:
    text, finder, out = "".join(deltas), StopStrings(stops), ""
    wanted = first_to_end(text, stops)
    for delta in deltas:
        out += finder.push(delta)
        assert wanted.startswith(out)  # nothing goes out that a stop string takes back
        so_far = text[: len(out)]
        assert out == so_far
    out += finder.finish()
    assert out == wanted
    assert (finder.hit is not None) == any(stop in text for stop in stops)


def test_only_the_beginning_of_a_stop_string_is_held() -> None:
    finder = StopStrings(["END"])
    assert [finder.push(part) for part in ("a", "bE", "N", "x", "EEN")] == ["a", "b", "", "ENx", "E"]
    assert finder.finish() == "EN"


TEMPLATES = {
    "loops": (
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "tools": (
        "{%- if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif -%}"
        "{%- for m in messages -%}{% generation %}{{ m.content }}{% endgeneration %}|{%- endfor -%}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        "{{ strftime_now('%Y') }}{{ thinking }}"
    ),
    "default": DEFAULT_TEMPLATE,
}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": " <b>Hi</b> & 'é' \n"},
    {"role": "assistant", "content": "ok"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    tokenizer = byte_tokenizer()
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>")
    wanted = theirs.apply_chat_template(
        MESSAGES,
        chat_template=TEMPLATES[name],
        tools=TOOLS,
        add_generation_prompt=True,
        tokenize=False,
        thinking="on",
    )
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "<|end|>"})
    assert ours.render(MESSAGES, tools=TOOLS, variables={"thinking": "on"}) == wanted
    assert ours.takes_tools == (name == "tools")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 'a' }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_breaks_out_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest, match="chat template"):
        ChatTemplate(source, {}).render(MESSAGES)


def test_where_the_template_is_taken_from() -> None:
    both = {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}
    assert template_source({"chat_template": "A"}, None) == ("A", None)
    assert template_source({"chat_template": "A"}, "file") == ("file", None)
    assert template_source(both, None) == ("A", "B")
    assert template_source({}, None) == (DEFAULT_TEMPLATE, None)


def test_assets() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7)
    found = parse_assets(
        {
            "tokenizer.json": tokenizer.to_str().encode(),
            "config.json": json.dumps(
                {"eos_token_id": 3, "id2label": {"1": "dog", "0": "cat"}, "vocab_size": 9}
            ).encode(),
            "generation_config.json": b'{"eos_token_id": [4, 5]}',
            "tokenizer_config.json": b'{"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}"}',
            "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}',
        }
    )
    assert found.eos_token_ids == (4, 5) and found.labels == ("cat", "dog") and found.pooling == "cls"
    assert found.tokenizer is not None and len(found.tokenizer.encode("abcde").ids) == 5
    assert found.template is not None and found.template.render(MESSAGES) == "<s>"
    with pytest.raises(ApiError, match=r"config\.json"):
        parse_assets({"config.json": b"{"})
    with pytest.raises(ApiError, match=r"tokenizer\.json"):
        parse_assets({"tokenizer.json": b"{}"})


def test_special_tokens_are_no_text() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|x|>", special=True)])
    stream = Detokenizer(tokenizer, tokenizer.encode("q").ids)
    ids = [*tokenizer.encode("a").ids, tokenizer.token_to_id("<|x|>"), *tokenizer.encode("b").ids]
    assert stream.push(ids) + stream.finish() == "ab"


@given(st.recursive(st.text('[]{}"\\', max_size=4), lambda inner: st.lists(inner, max_size=3), max_leaves=8))
def test_depth_is_counted_outside_of_strings(value: object) -> None:
    def depth(item: object) -> int:
        return 1 + max(map(depth, item), default=0) if isinstance(item, list) else 0

    body = json.dumps(value).encode()
    check_shape(body, LIMITS.text_json, depth(value))
    if depth(value):
        with pytest.raises(BadRequest, match="deeper"):
            check_shape(body, LIMITS.text_json, depth(value) - 1)


def repeated(start: str, item: str, end: str, nbytes: int) -> bytes:
    """Return valid JSON of about `nbytes`."""
    return f"{start}{','.join([item] * (nbytes // (len(item) + 1)))}{end}".encode()


LIMITS = RequestLimits()
PROMPT, MOST = '{"model":"m","prompt":[', LIMITS.text_bytes - 64
# Whatever a body is full of: as much of it as is let in, and as many bytes as there may be.
TEXTS = {
    "lists": [repeated(PROMPT, "[1]", "]}", n) for n in (4 * LIMITS.text_json.containers - 64, MOST)],
    "ids": [repeated(PROMPT, "1", "]}", n) for n in (2 * LIMITS.text_json.commas, MOST)],
    "texts": [repeated(PROMPT, '"a"', "]}", n) for n in (4 * LIMITS.text_json.strings - 64, MOST)],
    "escapes": [repeated(PROMPT, '"' + "\\\\" * (1 << 20) + '\\""', "]}", MOST)],
    "brackets in a text": [repeated(PROMPT, '"' + "[{,]}" * 400_000 + '"', "]}", MOST)],
    "objects": [
        repeated('{"model":"m","messages":[', "{}", "]}", n)
        for n in (3 * LIMITS.text_json.containers - 64, MOST)
    ],
    "opened": [b"[" * MOST],
    "closed": [b"]" * MOST],
}


@pytest.fixture(scope="module")
def bearable_s() -> float:
    """Return the longest pause of the event loop that passes: a tenth of decoding the fullest body at once.

    In processor time, so that only this machine's speed matters.
    """
    part, parts = repeated("[", "[1]", "]", LIMITS.body_bytes // 8), 8
    decode_all = msgspec.json.Decoder(object).decode

    def once() -> float:
        began = time.process_time()
        decode_all(part)
        return time.process_time() - began

    return min(once() for _ in range(2)) * parts / 10


async def longest_block_s(work: Callable[[], Awaitable[object]], bearable_s: float) -> float:
    """Return the most processor time between two turns of the event loop during `work`, with its threads.

    A thread that holds the interpreter delays the loop. The first of three tries that passes counts.
    """

    async def once() -> float:
        longest, last = 0.0, time.process_time()
        task = asyncio.ensure_future(work())
        while not task.done():
            await asyncio.sleep(0)
            longest, last = max(longest, time.process_time() - last), time.process_time()
        with suppress(ApiError):
            task.result()
        return longest

    longest = await once()
    for _ in range(2):
        longest = longest if longest < bearable_s else await once()
    return longest


@pytest.mark.parametrize("kind", TEXTS)
async def test_no_text_body_holds_the_event_loop_up(kind: str, bearable_s: float) -> None:
    decoders = {schema: msgspec.json.Decoder(schema) for schema in (CompletionRequest, ChatRequest)}
    for schema in decoders:
        for body in TEXTS[kind]:

            async def work(body: bytes = body, schema: type[object] = schema) -> None:
                asked = decode(body, decoders[schema], LIMITS)
                if isinstance(asked, CompletionRequest):
                    split_prompts(asked.prompt, param="prompt", limit=128)

            assert await longest_block_s(work, bearable_s) < bearable_s


@pytest.mark.parametrize("item", ["[[1],[1]]", "0.5", '"a"', '{"a":{}}', '"' + "\\\\" * 1000 + '"', '"é[{,"'])
@pytest.mark.parametrize("bounds", [LIMITS.image_json, LIMITS.handler_json], ids=["image", "handler"])
async def test_no_large_body_holds_the_event_loop_up(
    item: str, bounds: JsonBounds, bearable_s: float
) -> None:
    decoder = msgspec.json.Decoder(ClassifyRequest)
    for nbytes in (1 << 21, LIMITS.body_bytes):
        body = repeated('{"image":[', item, "]}", nbytes)

        async def work(body: bytes = body) -> None:
            if bounds is LIMITS.handler_json:
                await asyncio.to_thread(check_json, body, LIMITS, bounds)
            else:
                await asyncio.to_thread(decode, body, decoder, LIMITS, bounds)

        assert await longest_block_s(work, bearable_s) < bearable_s


def test_how_much_a_body_may_hold() -> None:
    bounds = JsonBounds(containers=3, strings=2, commas=4)
    anything = msgspec.json.Decoder(object)
    for body in (b'[["],[{\\"", "\\\\"],[1,2,3]]', b'{"a":[],"b":{}}'):
        assert decode(body, anything, LIMITS, bounds) == json.loads(body)
    for body in (b"[[],[],[]]", b'["","",""]', b"[1,2,3,4,5,6]", b'["\\\\","\\\\","\\\\"]'):
        with pytest.raises(ApiError) as refused:
            decode(body, anything, RequestLimits(json_depth=2), bounds)
        assert (refused.value.status, refused.value.code) == (413, "too_complex")


class Point(msgspec.Struct):
    x: int
    tags: list[str] = []


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        (b'{"x": 1', BadRequest, None),
        (b"", BadRequest, None),
        (b"\xff", BadRequest, None),
        (b"{}", Unprocessable, "x"),
        (b'{"x": "1"}', Unprocessable, "x"),
        (b'{"x": 1, "tags": ["a", 2]}', Unprocessable, "tags[1]"),
        (b"[]", Unprocessable, None),
        (b'{"x": 1, "y": ' + b"[" * 70 + b"]" * 70 + b"}", BadRequest, None),
    ],
)
def test_bad_bodies(body: bytes, kind: type[ApiError], param: str | None) -> None:
    with pytest.raises(kind) as caught:
        decode(body, msgspec.json.Decoder(Point), RequestLimits())
    assert caught.value.param == param


def test_scaling_patch() -> None:
    decoder = msgspec.json.Decoder(ScalingPatch)
    by_load = Scaling(policy=ScalingMode.LOAD)
    given = decoder.decode(b'{"target_concurrency": 4}').applied(by_load)
    assert given == Scaling(target_concurrency=4, policy=ScalingMode.CONCURRENCY)
    both = decoder.decode(b'{"target_concurrency": 4, "policy": "load"}').applied(by_load)
    assert both.policy is ScalingMode.LOAD
    faster = decoder.decode(b'{"tbt_target_s": 0.1}')
    assert faster.applied(by_load) == Scaling(policy=ScalingMode.LOAD, tbt_target_s=0.1)
    for bad in (faster, decoder.decode(b'{"target_concurrency": 4, "tbt_target_s": 0.1}')):
        with pytest.raises(InvalidRecord, match=r"tbt_target_s \(--tbt-target\) .*--scaling load"):
            bad.applied(Scaling())
    before = Scaling(max_instances=4, target_concurrency=2)
    assert decoder.decode(b'{"max_instances": null}').applied(before) == Scaling(target_concurrency=2)
    assert decoder.decode(b"{}").empty
    with pytest.raises(InvalidRecord):
        decoder.decode(b'{"min_instances": 5}').applied(before)


def test_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32 + "\n")
    given_flags = ["--redis-url", "unix:///r.sock", "--store", "/blobs", "--secret-file", str(secret)]
    found = parse([*given_flags, "--grace", "90s", "--max-body", "1MiB", "--port", "0"], {})
    assert (found.grace_s, found.limits.body_bytes, found.secrets) == (90, 1 << 20, (b"s" * 32,))
    for bad in (["--grace", "90"], ["--port", "70000"], ["--expect-nodes", "-1"], ["--nonsense"]):
        with pytest.raises(SystemExit):
            parse([*given_flags, *bad], {})
    with pytest.raises(SystemExit):
        parse(given_flags[:-2], {})
    assert "secret" in capsys.readouterr().err
