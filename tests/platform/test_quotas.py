"""Limits of keys on a running platform, as OpenAI's client and the command line see them."""

import openai
import pytest
from openai import OpenAI

from tests.fixtures.platform import Platform

CODER = "functions/tiny-coder"


@pytest.fixture(scope="module")
def coder(platform: Platform) -> str:
    platform.run("deploy", CODER, "--name", "limited", "--keep-alive", "10m")
    return "limited"


def client(platform: Platform, key: str, *, retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{platform.url}/v1", api_key=key, max_retries=retries)


def test_a_rate_refuses_and_admits_after_retry_after(platform: Platform) -> None:
    made = platform.json("keys", "create", "--requests-per-minute", "60")
    with client(platform, made["key"]) as hasty:
        with pytest.raises(openai.RateLimitError) as caught:
            for _ in range(1000):
                hasty.models.list()
    refused = caught.value
    assert refused.code == "rate_limit_exceeded"
    assert refused.response.headers["x-ratelimit-limit-requests"] == "60"
    assert refused.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.response.headers["retry-after"] == "1"
    with client(platform, made["key"], retries=2) as patient:
        for _ in range(3):
            assert patient.models.list().object == "list"


def test_tokens_are_charged_when_they_are_known(platform: Platform, coder: str) -> None:
    made = platform.json("keys", "create", "--tenant", "rated", "--tokens-per-minute", "60")
    ask = {"model": coder, "prompt": [5] * 30, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    with client(platform, made["key"]) as hasty:
        first = hasty.completions.with_raw_response.create(**ask)
        assert first.headers["x-ratelimit-limit-tokens"] == "60"
        assert first.headers["x-ratelimit-remaining-tokens"] == "60"
        with pytest.raises(openai.RateLimitError) as caught:
            hasty.completions.create(**ask)
    refused = caught.value
    assert refused.code == "rate_limit_exceeded"
    assert refused.response.headers["x-ratelimit-remaining-tokens"] == "0"
    assert 100 <= int(refused.response.headers["retry-after"]) <= 120  # of 170 s: 230 tokens, 60 a minute
    with platform.http() as http:
        rows = http.get("/admin/usage/report?tenant=rated").json()["rows"]
        assert [(row["requests"], row["completion_tokens"]) for row in rows] == [(1, 200)]
        metrics = http.get("/metrics").text
    assert 'hypercast_requests_total{code="rate_limit_exceeded",function=""' in metrics


def test_limits_from_the_command_line(platform: Platform, coder: str) -> None:
    made = platform.json(
        "keys", "create", "--requests-per-minute", "3", "--max-concurrent", "2", "--spend-limit", "0/day"
    )
    with client(platform, made["key"]) as poor:
        with pytest.raises(openai.RateLimitError) as caught:
            poor.models.list()
        assert caught.value.code == "insufficient_quota"
        changed = platform.json(
            "keys", "update", made["id"], "--spend-limit", "12.50/month", "--max-concurrent", "none"
        )
        assert (changed["spend_limit"], changed["max_concurrent"]) == ("12.5/month", None)
        assert changed["requests_per_minute"] == 3
        assert poor.models.list().data
    listed = platform.run("keys", "list", "-o", "csv").stdout
    assert "12.5/month" in next(line for line in listed.splitlines() if line.startswith(made["id"]))
    assert platform.run("keys", "update", made["id"], check=False).returncode == 2
    assert platform.run("keys", "create", "--spend-limit", "5/week", check=False).returncode == 2
