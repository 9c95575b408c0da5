"""Messages for schema violations: they name the field and what it must be."""

import msgspec
import pytest

from gateway.core.errors import from_validation
from gateway.schemas.admin import CreateKey
from gateway.schemas.openai import CompletionRequest


def violation(kind: type, body: str) -> tuple[str, str | None]:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=kind)
    error = from_validation(caught.value)
    return error.message, error.param


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ("", "'prompt' is required", "prompt"),
        (',"prompt":""', "'prompt' must not be empty", "prompt"),
        (',"prompt":{}', "'prompt' must be a string or an array, not an object", "prompt"),
        (',"prompt":"a","n":"1"', "'n' must be an integer, not a string", "n"),
        (',"prompt":"a","max_tokens":0', "'max_tokens' must be at least 1", "max_tokens"),
        (',"prompt":"a","temperature":3', "'temperature' must be at most 2.0", "temperature"),
        (',"prompt":"a","stop":["a",1]', "'stop[1]' must be a string, not an integer", "stop[1]"),
    ],
)
def test_a_message_names_the_field_and_its_rule(fields: str, message: str, param: str) -> None:
    assert violation(CompletionRequest, f'{{"model":"m"{fields}}}') == (message, param)


def test_a_body_of_another_type() -> None:
    assert violation(CompletionRequest, "[]") == ("the body must be an object, not an array", None)


def test_patterns_are_in_plain_words() -> None:
    message, param = violation(CreateKey, '{"tenant":"-acme"}')
    assert param == "tenant" and message.startswith("'tenant' must be 1 to 128 letters, digits")
    assert violation(CreateKey, '{"tenant":"a","foo":1}') == ("'foo' is not a known field", "foo")
