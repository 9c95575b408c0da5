"""The key of a prompt's beginning."""

from gateway.core.prefix import PREFIX_BYTES, PREFIX_TOKENS, prefix_of_text, prefix_of_tokens
from gateway.requests.forwarding import prompt_start

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


def test_conversations_with_one_beginning_have_one_key() -> None:
    system = '{"role":"system","content":"' + "x" * PREFIX_BYTES + '"}'
    bodies = [
        f'{{"model":"f","seed":{seed},"messages":[{system},{{"role":"user","content":"{seed}"}}]}}'.encode()
        for seed in (1, 2)
    ]
    one, other = (prefix_of_text("t", 1, prompt_start(body)) for body in bodies)
    assert one == other != 0
    assert prefix_of_text("t", 1, prompt_start(b'{"prompt":"short"}')) == 0
