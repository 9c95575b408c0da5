"""Limits on the requests that a key has under way."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.concurrency import KeyConcurrency
from gateway.errors import TooMany
from registry.api_key import ApiKey, Role


def key(name: str, limit: int | None) -> ApiKey:
    return ApiKey(
        id=name, digest="", tenant="t", role=Role.CALLER, name="", created_at=0, max_concurrent=limit
    )


@given(limit=st.integers(1, 5), asked=st.integers(0, 12))
def test_a_key_gets_its_places_and_gives_them_back(limit: int, asked: int) -> None:
    counts = KeyConcurrency()
    with ExitStack() as held:
        got = 0
        for _ in range(asked):
            try:
                held.enter_context(counts.admit(key("a", limit)))
                got += 1
            except TooMany as error:
                assert (error.status, error.retry_after_s) == (429, 1)
        assert got == min(asked, limit)
        with counts.admit(key("b", 1)):
            pass
    assert repr(counts) == "<KeyConcurrency {}>"


def test_a_key_without_a_limit_is_never_refused() -> None:
    counts = KeyConcurrency()
    with ExitStack() as held:
        for _ in range(100):
            held.enter_context(counts.admit(key("a", None)))


def test_a_failure_gives_the_place_back() -> None:
    counts = KeyConcurrency()
    with pytest.raises(ValueError, match="x"), counts.admit(key("a", 1)):
        raise ValueError("x")
    with counts.admit(key("a", 1)):
        pass
