"""Disaggregated serving by real engines: the same tokens, whichever instances run them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fixtures.decoders import write_decoder
from tests.fixtures.platform import Platform

PROMPTS = [[(seed + step * 7) % 97 for step in range(20 + 6 * seed)] for seed in range(8)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Three nodes on three virtual hosts."""
    flags = ("--nodes", "3", "--hosts", "3", "--kv-moves", "always")
    running = Platform(data=tmp_path_factory.mktemp("three"), flags=flags)
    running.up()
    yield running
    running.down()


def answers(platform: Platform, name: str) -> list[list[int]]:
    """Return the tokens of all prompts, run at once."""

    def answer(prompt: list[int]) -> list[int]:
        body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        with platform.http() as http:
            response = http.post("/v1/completions", json=body | {"return_token_ids": True})
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(answer, PROMPTS))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_calls_move_after_their_first_token_and_stay_the_same(
    three: Platform, tmp_path: Path, family: str
) -> None:
    write_decoder(family, tmp_path)
    three.run("deploy", str(tmp_path), "--name", family, "--keep-alive", "10m")
    expected = answers(three, family)
    three.run("scale", family, "--serving", "disaggregated", "--instances", "3")

    def roles() -> dict[str, str]:
        found: dict[str, str] = (three.get(f"/admin/functions/{family}")["live"] or {}).get("roles", {})
        return found

    three.until("all instances have roles", lambda: len(roles()) == 3)
    assert sorted(set(roles().values())) == ["decode", "prefill"]
    assert answers(three, family) == expected
    assert "disaggregated: " in three.run("describe", family).stdout
    assert three.logs(10_000).count("loaded K and V of") >= len(PROMPTS)

    def is_prefetched() -> bool:
        """Return whether K and V came during a prompt; a short one may be over before they are asked for."""
        assert answers(three, family) == expected
        return "while its prompt ran" in three.logs(10_000)

    three.until("K and V of a call come while its prompt runs", is_prefetched)
    three.run("delete", family, "--yes")
