"""Sequences that follow a grammar: in a whole engine, in a pipeline, and continued elsewhere."""

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from invoker.engine.contract import NewSequence
from invoker.engine.decoder import DecoderEngine
from invoker.engine.grammars import GrammarError, Grammars, NoTokenizer
from tests.fixtures.checkpoints import VOCABULARY
from tests.fixtures.engine import KV_BYTES, cached_image, run_all, sequence
from tests.fixtures.stage import make_stages, pipeline_of

DIGEST = "ab" * 32
END = VOCABULARY - 1
REGEX = LLMatcher.grammar_from_regex("[a-f]{3}-[0-9]{2,8}")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
OBJECT = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


def _tokenizer() -> Tokenizer:
    """Return byte-level tokens, and an end token with the model's last id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary |= {f"<{index}>": index for index in range(len(alphabet), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{index}>" for index in range(len(alphabet), VOCABULARY)])
    return tokenizer


TOKENIZER = _tokenizer()


def _text(tokens: list[int]) -> str:
    text = TOKENIZER.decode(tokens)
    assert isinstance(text, str)
    return text


@pytest.fixture
def grammars() -> Grammars:
    made = Grammars()
    made.add_tokenizer(DIGEST, TOKENIZER.to_str().encode())
    return made


def _requests(count: int = 6) -> list[NewSequence]:
    """Return sequences of which every third is free, the others alternately a text and an object."""
    drawn = {"temperature": 1.0, "seed": 5, "eos_token_ids": (END,)}
    given = [{"grammar": REGEX}, {"grammar": OBJECT}, {}]
    return [
        sequence(
            str(i), [7 + i, 9], max_tokens=40, **drawn, **given[i % 3], tokenizer=DIGEST if i % 3 < 2 else ""
        )
        for i in range(count)
    ]


def _changed(one: NewSequence, **changes: object) -> NewSequence:
    return replace(one, sampling=msgspec.structs.replace(one.sampling, **changes))


def _engine(grammars: Grammars) -> DecoderEngine:
    spec, region, _ = cached_image("llama")
    return DecoderEngine(spec, region, KV_BYTES, max_sequences=8, prefill_budget=24, grammars=grammars)


def test_texts_follow_their_grammars(grammars: Grammars) -> None:
    found = run_all(_engine(grammars), _requests())
    for number in (0, 3):
        assert re.fullmatch("[a-f]{3}-[0-9]{2,8}", _text(found[str(number)]))
        assert found[str(number)][-1] == END
    for number in (1, 4):
        made = json.loads(_text(found[str(number)]))
        assert isinstance(made["name"], str) and isinstance(made["old"], bool)
    without = run_all(_engine(grammars), [_changed(one, grammar="") for one in _requests()])
    assert found["2"] == without["2"]  # its neighbours' grammars are not its own


@pytest.mark.parametrize("steps", [2, 9, 30])
def test_a_pipeline_and_a_switch_change_no_token(grammars: Grammars, steps: int) -> None:
    requests = _requests()
    expected = run_all(_engine(grammars), requests)
    stages = make_stages("llama", (0, 1, 3, 4))
    for stage in stages:
        stage._grammars = grammars
    pipeline = pipeline_of(stages)
    for request in requests:
        pipeline.add(request)
    seen: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended = set()
    for _ in range(steps):
        for output in pipeline.step():
            assert not output.error, output.error
            if output.token_id is not None:
                seen[output.request_id].append(output.token_id)
            if output.finish_reason:
                ended.add(output.request_id)
    left = [
        replace(one, generated_ids=tuple(seen[one.request_id]))
        for one in requests
        if one.request_id not in ended
    ]
    rest = run_all(_engine(grammars), left)
    for request in requests:
        assert seen[request.request_id] + rest.get(request.request_id, []) == expected[request.request_id]


def test_what_cannot_be_is_refused_alone(grammars: Grammars) -> None:
    engine = _engine(grammars)
    regex, *_ = _requests()
    unknown = _changed(regex, tokenizer="cd" * 32)
    with pytest.raises(NoTokenizer, match="cdcdcdcdcdcd is not on this node"):
        engine.add(unknown)
    with pytest.raises(GrammarError):
        engine.add(_changed(regex, grammar="start: /(/"))
    with pytest.raises(GrammarError):
        engine.add(replace(regex, generated_ids=(3, 3, 3)))  # which the grammar does not allow
    assert not engine.has_work
    engine.check_integrity()
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        grammars.add_tokenizer("00", b"{}")


def test_only_the_last_tokenizers_are_kept(grammars: Grammars) -> None:
    content = TOKENIZER.to_str().encode()
    sampling = _requests()[0].sampling
    assert grammars.matcher(sampling, VOCABULARY, ()) is not None
    for number in range(8):
        grammars.add_tokenizer(f"{number:02}", content)
    with pytest.raises(NoTokenizer):
        grammars.matcher(sampling, VOCABULARY, ())


def test_a_real_tokenizer_is_used(grammars: Grammars) -> None:
    content = Path("functions/tiny-coder/model/tokenizer.json").read_bytes()
    grammars.add_tokenizer("real", content)
    sampling = _changed(_requests()[0], tokenizer="real", eos_token_ids=(0,)).sampling
    matcher = grammars.matcher(sampling, 2048, ())
    assert matcher is not None and not matcher.error
