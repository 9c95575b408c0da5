"""Chunks of streams: those that are encoded around their text equal those that are encoded whole."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.detokenize import token_texts
from gateway.requests.formats import ChatFormat, CompletionFormat
from gateway.requests.generation import ChoiceDelta
from gateway.requests.reply_format import ReplyOptions


def options(*, include_usage: bool = False, token_ids: bool = False) -> ReplyOptions:
    return ReplyOptions(
        id="cmpl-1",
        model="<text>",
        created=7,
        token_text=token_texts(None),
        token_ids=token_ids,
        logprobs=None,
        include_usage=include_usage,
    )


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
@given(text=st.text(min_size=1), index=st.integers(0, 200), include_usage=st.booleans())
def test_a_chunk_is_the_same_whether_or_not_its_frame_is_encoded_once(
    kind: type[CompletionFormat] | type[ChatFormat], text: str, index: int, include_usage: bool
) -> None:
    delta = ChoiceDelta(index=index, text=text)
    quick, general = kind(options(include_usage=include_usage)), kind(options(include_usage=include_usage))
    general._is_plain = False
    expected = general.delta(delta)
    assert quick.delta(delta) == expected == quick.delta(delta)
    assert expected is not None and msgspec.json.decode(expected)["choices"][0]["index"] == index


def test_an_empty_chunk_is_sent_for_a_first_token_only() -> None:
    form = CompletionFormat(options())
    assert form.delta(ChoiceDelta(index=0, text="")) is None
    assert form.delta(ChoiceDelta(index=0, text=""), first=True) is not None
    assert form.delta(ChoiceDelta(index=0, text="", finish_reason="stop"), first=True) is None
