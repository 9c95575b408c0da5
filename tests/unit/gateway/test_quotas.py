"""Limits of keys: refusals, rate-limit headers, and concurrency leases."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest

from gateway.tenants.concurrency_leases import ConcurrencyLeases
from gateway.tenants.quotas import duration_text, refusal
from registry.clock import FakeClock
from registry.errors import StateUnavailable
from registry.memory.state import MemoryState
from registry.records.api_key import ApiKey, KeyRole, SpendPeriod
from registry.records.quota import ConcurrencyLease, RateLimitDecision, RateLimitOutcome
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S

ASK: dict[str, Any] = {"model": "coder", "prompt": "abc", "max_tokens": 2}


async def make_key(gw: Gateway, **limits: object) -> dict[str, Any]:
    async with gw.http() as admin:
        made = await admin.post("/admin/keys", json={"tenant": "acme", **limits})
        assert made.status_code == 201, made.text
        key: dict[str, Any] = made.json()
        return key


async def test_reads_of_the_ledger_have_the_rate_of_the_key_apart_from_its_calls() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        made = await make_key(gw, requests_per_minute=2, max_concurrent=1, spend_limit_nanos=1)
        reads = ("report", "summary", "gpu-time", "show/none")
        async with gw.http(made["key"]) as http:
            found = [await http.get(f"/admin/usage/{path}") for path in reads]
            assert [one.status_code for one in found] == [200, 200, 429, 429]
            assert found[0].headers["x-ratelimit-remaining-requests"] == "1"
            assert found[-1].json()["error"]["code"] == "rate_limit_exceeded"
            assert (await http.post("/v1/completions", json=ASK)).status_code == 200
        async with gw.http() as http:
            found = [await http.get(f"/admin/usage/{path}") for path in reads]
            assert [one.status_code for one in found] == [200, 200, 200, 404]


async def test_a_rate_of_requests() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        made = await make_key(gw, requests_per_minute=2)
        assert (made["requests_per_minute"], made["tokens_per_minute"]) == (2, None)
        async with gw.http(made["key"]) as http:
            done = await http.post("/v1/completions", json=ASK)
            assert done.status_code == 200
            assert done.headers["x-ratelimit-limit-requests"] == "2"
            assert done.headers["x-ratelimit-remaining-requests"] == "1"
            assert done.headers["x-ratelimit-reset-requests"] == "30s"
            assert "x-ratelimit-limit-tokens" not in done.headers
            wrong = await http.post("/v1/completions", json={"model": "coder"})
            assert wrong.status_code == 400
            assert wrong.headers["x-ratelimit-remaining-requests"] == "0"
            refused = await http.post("/v1/completions", json=ASK)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert 28 <= int(refused.headers["retry-after"]) <= 30
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert refused.headers["x-request-id"]
            # What is about the ledger is no request of a function.
            assert (await http.get("/admin/usage/report")).json()["rows"][0]["requests"] == 1
            metrics = (await http.get("/metrics")).text
        labels = 'code="rate_limit_exceeded",function="",start_kind="",version=""'
        assert f"hypercast_requests_total{{{labels}}} 1.0" in metrics
        assert len(gw.dispatcher.calls) == 1


async def test_limits_hold_for_all_gateways_together() -> None:
    state = MemoryState()
    async with gateway(state=state) as one, gateway(state=state) as other:
        made = await make_key(one, requests_per_minute=10)
        async with one.http(made["key"]) as here, other.http(made["key"]) as there:
            answers = await asyncio.gather(
                *(http.get("/v1/models") for http in (here, there) for _ in range(15))
            )
        assert sorted(answer.status_code for answer in answers) == [200] * 10 + [429] * 20


async def test_a_rate_of_tokens_may_be_overdrawn_once() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        made = await make_key(gw, tokens_per_minute=1)
        async with gw.http(made["key"]) as http:
            done = await http.post("/v1/completions", json=ASK)
            assert done.headers["x-ratelimit-remaining-tokens"] == "1"
            assert done.headers["x-ratelimit-reset-tokens"] == "0ms"
            assert done.json()["usage"]["total_tokens"] == 5
            refused = await http.post("/v1/completions", json=ASK)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "tokens a minute" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "120"
            assert refused.headers["x-ratelimit-reset-tokens"].startswith(("5m0s", "4m59"))


async def test_a_spend_limit() -> None:
    async with gateway() as gw, gw.http() as admin:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        rate = {"id": "cpu-002", "gpu_type": "cpu", "gpu_second_nanos": 0, "request_nanos": 100}
        assert (await admin.post("/admin/prices", json=rate)).status_code == 201
        made = await make_key(gw, spend_limit_nanos=150, spend_period="total")
        client = gw.openai(made["key"])
        client.max_retries = 5
        for _ in range(2):
            await client.completions.create(**ASK)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**ASK)
        assert caught.value.code == "insufficient_quota"
        assert "retry-after" not in caught.value.response.headers  # it never resets
        assert "total spend limit of 0.00000015 USD" in caught.value.message
        assert len(gw.dispatcher.calls) == 2
        listed = (await admin.get("/admin/keys")).json()["keys"]
        assert [key["spent_nanos"] for key in listed if key["id"] == made["id"]] == [200]
        path = f"/admin/keys/{made['id']}"
        changed = (await admin.patch(path, json={"spend_limit_nanos": 201})).json()
        assert (changed["spend_limit_nanos"], changed["spend_period"]) == (201, "total")
        await client.completions.create(**ASK)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(**ASK)
        lifted = (await admin.patch(path, json={"spend_limit_nanos": None})).json()
        assert (lifted["spend_limit_nanos"], lifted["spent_nanos"]) == (None, None)
        await client.completions.create(**ASK)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_single_place_serves_one_after_the_other_without_a_refusal(stream: bool) -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        client = gw.openai((await make_key(gw, max_concurrent=1))["key"])
        for _ in range(30):
            if stream:
                async for _ in await client.completions.create(**ASK, stream=True):
                    pass
            else:
                await client.completions.create(**ASK)


async def test_places_of_failed_and_left_requests_come_back() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer(), context_length=4096)
        made = await make_key(gw, max_concurrent=1)
        client = gw.openai(made["key"])
        stream = await client.completions.create(**(ASK | {"max_tokens": 4000}), stream=True)
        await anext(aiter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**ASK)
        assert caught.value.code == "too_many_concurrent"
        assert caught.value.response.headers["retry-after"] == "1"
        assert "x-should-retry" not in caught.value.response.headers
        await stream.close()
        await gw.dispatcher.until(lambda: not gw.dispatcher.open)
        await gw.services.limiter.wait_idle(10)
        await client.with_options(max_retries=3).completions.create(**ASK)
        async with gw.http(made["key"]) as http:
            for _ in range(30):
                answer = await http.post("/v1/completions", json={**ASK, "model": "nobody"})
                assert answer.status_code == 404
        await client.completions.create(**ASK)
        assert repr(gw.services.quotas) == "<Quotas <ConcurrencyLeases 0 held, 0 releasing>>"


class AwayState(MemoryState):
    """Admits nobody: it does not answer."""

    async def admit(self, key: ApiKey, place: str, *, ttl_s: float, now: float) -> RateLimitDecision:
        raise StateUnavailable("no answer")


async def test_without_redis_limited_keys_get_503() -> None:
    async with gateway(state=AwayState()) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        made = await make_key(gw, requests_per_minute=10)
        async with gw.http(made["key"]) as http:
            for _ in range(2):
                refused = await http.get("/v1/models")
                code = refused.json()["error"]["code"]
                assert (refused.status_code, code) == (503, "state_unavailable")
                assert refused.headers["retry-after"]
        async with gw.http(gw.caller_key) as http:
            assert (await http.get("/v1/models")).status_code == 200


async def test_changing_a_key() -> None:
    async with gateway() as gw, gw.http() as admin:
        made = await make_key(gw, requests_per_minute=7, max_concurrent=3)
        path = f"/admin/keys/{made['id']}"
        changed = (await admin.patch(path, json={"requests_per_minute": None})).json()
        assert (changed["requests_per_minute"], changed["max_concurrent"]) == (None, 3)
        for wrong in ({"max_concurrent": 0}, {"spend_period": "week"}, {"role": "admin"}):
            assert (await admin.patch(path, json=wrong)).status_code == 422
        assert (await admin.patch("/admin/keys/nobody", json={})).status_code == 404
        assert (await admin.delete(path)).json()["revoked_at"]
        # A change keeps what it was not asked to change.
        assert (await admin.patch(path, json={"max_concurrent": 4})).json()["revoked_at"]


class LeaseRecorder(MemoryState):
    """Records what is written, and fails the next `fails` times."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, int]] = []
        self.fails = 0
        self.changed = asyncio.Condition()

    async def renew_concurrency_leases(self, places: Sequence[ConcurrencyLease], *, ttl_s: float) -> None:
        await self._note("keep", len(places))

    async def release_concurrency_leases(self, places: Sequence[ConcurrencyLease]) -> None:
        await self._note("release", len(places))

    async def _note(self, what: str, count: int) -> None:
        async with self.changed:
            self.changed.notify_all()
            if self.fails:
                self.fails -= 1
                raise StateUnavailable("no answer")
            self.written.append((what, count))

    async def until_written(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: len(self.written) >= count)


async def test_places_are_kept_and_given_back_in_batches_also_after_a_failure() -> None:
    state, clock = LeaseRecorder(), FakeClock()
    leases = ConcurrencyLeases(state, clock)
    held = [ConcurrencyLease(key_id="k", id=str(n)) for n in range(5)]
    for lease in held:
        leases.add(lease)
    running = asyncio.create_task(leases.run())
    await asyncio.sleep(0)
    clock.advance(6)
    state.fails = 1
    leases.release(held[0])
    leases.release(held[1])
    leases.release(held[1])
    await leases.wait_released(held[0])
    await state.until_written(2)
    assert state.written == [("release", 2), ("keep", 3)]
    running.cancel()
    await asyncio.wait([running])
    leases.release(held[2])
    await leases.aclose()
    assert state.written[2:] == [("release", 3)]
    assert repr(leases) == "<ConcurrencyLeases 0 held, 0 releasing>"


def test_durations_as_openai_writes_them() -> None:
    written = [duration_text(ms) for ms in (0, 20, 1000, 7660, 60_000, 360_500, 3_723_000)]
    assert written == ["0ms", "20ms", "1s", "7.66s", "1m0s", "6m0.5s", "1h2m3s"]


async def test_spend_limits_name_their_currency_and_reset() -> None:
    now = 1_700_000_000.0  # 2023-11-14T22:13:20Z
    key = ApiKey(
        id="k",
        tenant="t",
        role=KeyRole.CALLER,
        digest="",
        name="",
        created_at=0.0,
        spend_limit_nanos=2_500_000_000,
    )
    spent = RateLimitDecision(
        outcome=RateLimitOutcome.SPENT,
        requests_used=0,
        tokens_used=0,
        concurrent=0,
        spent_nanos=3_000_000_000,
    )
    daily = refusal(replace(key, spend_period=SpendPeriod.DAY), spent, now, "EUR")
    assert daily.message == (
        "this key's spend limit of 2.5 EUR a day is reached; it resets at 2023-11-15T00:00:00Z"
    )
    assert ("retry-after", "120") in daily.all_headers()
    monthly = refusal(replace(key, spend_period=SpendPeriod.MONTH), spent, now, "EUR")
    assert monthly.message.endswith("it resets at 2023-12-01T00:00:00Z")
    total = refusal(replace(key, spend_period=SpendPeriod.TOTAL), spent, now, "EUR")
    assert "never resets" in total.message and total.retry_after_s is None
