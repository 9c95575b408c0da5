"""The key of a prompt's beginning."""

from gateway.core.prefix import PREFIX_TOKENS, prefix_of_tokens

LONG = list(range(PREFIX_TOKENS))


def test_prompts_with_one_beginning_have_one_key() -> None:
    key = prefix_of_tokens("t", 1, LONG)
    assert key and key == prefix_of_tokens("t", 1, [*LONG, 5, 6])
    others = {
        prefix_of_tokens("u", 1, LONG),
        prefix_of_tokens("t", 2, LONG),
        prefix_of_tokens("t", 1, LONG[::-1]),
    }
    assert key not in others and len(others) == 3
    assert prefix_of_tokens("t", 1, LONG[1:]) == 0
