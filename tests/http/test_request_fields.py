"""Fields of completion and chat requests: carried out at the node, or refused by name."""

import json

import openai
import pytest

from registry.messages.node import Generate
from tests.fixtures.gateway_http import byte_tokenizer, gateway

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


@pytest.mark.parametrize("penalty", [5e-324, 1e-3, 101])
async def test_a_penalty_by_which_logits_would_overflow_is_refused(penalty: float) -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        with pytest.raises(openai.BadRequestError, match="repetition_penalty"):
            await gw.openai().completions.create(
                model="coder", prompt="x", extra_body={"repetition_penalty": penalty}
            )


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
