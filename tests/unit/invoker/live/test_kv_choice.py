"""Whether K and V are sent or computed anew, and what that is judged by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invoker.kv.choice import (
    KvCosts,
    KvLinkRates,
    KvMethod,
    PrefillRate,
    decide_kv,
)
from rdmacast.link_rate import LinkRate
from registry.clock import FakeClock

# Llama-2 13B in 16 bits: two vectors of 5,120 numbers a token and layer.
LLAMA_13B = KvCosts(token_layer_bytes=20_480, link_bytes_per_s=50e9, prefill_tokens_per_s=19_000.0)


def test_a_fast_link_moves_keys_and_values_a_slow_one_does_not() -> None:
    fast = decide_kv(1000, 40, LLAMA_13B)
    assert (fast.method, fast.transfer_s) == (KvMethod.TRANSFER, pytest.approx(0.016384))
    assert fast.recompute_s == pytest.approx(1 / 19)
    assert fast.reason == (
        "transfer: recomputing 1000 tokens takes 52.6 ms, transferring 819.2 MB of 40 layers 16.4 ms"
    )
    slow = decide_kv(
        1000,
        40,
        KvCosts(token_layer_bytes=20_480, link_bytes_per_s=1.25e9, prefill_tokens_per_s=19_000.0),
    )
    assert slow.method is KvMethod.RECOMPUTE
    assert slow.reason.startswith("recompute: recomputing 1000 tokens takes 52.6 ms")


def test_latency_and_a_link_without_room_speak_for_computing() -> None:
    costs = KvCosts(token_layer_bytes=20_480, link_bytes_per_s=0.0, prefill_tokens_per_s=19_000.0)
    assert decide_kv(10, 40, costs).method is KvMethod.RECOMPUTE
    near = KvCosts(
        token_layer_bytes=20_480, link_bytes_per_s=50e9, prefill_tokens_per_s=19_000.0, latency_s=1.0
    )
    assert decide_kv(10, 40, near).method is KvMethod.RECOMPUTE


@given(tokens=st.integers(0, 100_000), layers=st.integers(0, 200))
def test_it_is_the_cheaper_way(tokens: int, layers: int) -> None:
    decision = decide_kv(tokens, layers, LLAMA_13B)
    cheaper = min(decision.recompute_s, decision.transfer_s)
    assert cheaper == {"recompute": decision.recompute_s, "transfer": decision.transfer_s}[decision.method]


def test_nothing_is_sent_where_all_layers_are_here() -> None:
    decision = decide_kv(1000, 0, LLAMA_13B)
    assert decision.method is KvMethod.TRANSFER and decision.transfer_s == 0


def test_prefill_is_as_fast_as_the_fastest_step() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s(40) is None
    rate.record(1, 10, 0.01)  # a token is decoded
    assert rate.tokens_per_s(40) == pytest.approx(25)
    rate.record(512, 10, 0.05)
    rate.record(1, 10, 0.02)
    rate.record(8, 10, 0.0)  # by a clock that is too coarse
    assert rate.tokens_per_s(40) == pytest.approx(2560)
    assert repr(rate) == "<PrefillRate 102400 tokens x layers / s>"


A, B = frozenset({"a", "c"}), frozenset({"a"})


def test_a_link_is_judged_by_what_came_over_it() -> None:
    links = KvLinkRates()
    links.record_transfer(A, 1000, 1.0)  # latency, no rate
    assert links.bytes_per_s(A) == LinkRate().bytes_per_s
    links.record_transfer(A, 1 << 20, 0.5)
    assert links.bytes_per_s(A) == 2 << 20
    links.record_transfer(A, 1 << 20, 0.25)
    assert links.bytes_per_s(A) == 3 << 20
    assert links.bytes_per_s(B) == LinkRate().bytes_per_s


def test_a_link_without_a_transfer_is_as_fast_as_its_port() -> None:
    links = KvLinkRates(LinkRate(bytes_per_s=1e6))
    assert links.bytes_per_s(A) == 1e6
    links.record_transfer(A, 1 << 20, 0.5)
    assert (links.bytes_per_s(A), links.bytes_per_s(B)) == (2 << 20, 1e6)


def test_hosts_are_judged_by_what_did_not_come_in_time() -> None:
    clock = FakeClock()
    links = KvLinkRates(now_s=clock.monotonic_s)
    links.record_timeout(A, 0.05)  # it may not have been put aside yet
    clock.advance(61.0)
    links.record_timeout(A, 0.05)
    assert links.min_s(A) == 0.0
    clock.advance(30.0)
    links.record_timeout(A, 0.06)
    assert (links.min_s(A), links.min_s(B)) == (0.06, 0.0)
    clock.advance(60.0)
    assert links.min_s(A) == 0.0
    for _ in range(2):
        links.record_timeout(B, 0.05)
    links.record_transfer(B, 10, 0.001)
    assert links.min_s(B) == 0.0


def test_what_takes_some_time_at_least_is_worth_it_for_long_calls() -> None:
    costs = KvCosts(token_layer_bytes=1, link_bytes_per_s=1e9, prefill_tokens_per_s=1000.0, min_s=0.05)
    assert [decide_kv(tokens, 1, costs).method for tokens in (40, 60)] == [
        KvMethod.RECOMPUTE,
        KvMethod.TRANSFER,
    ]


def test_a_link_that_seemed_slow_is_tried_again() -> None:
    clock = FakeClock()
    links = KvLinkRates(now_s=clock.monotonic_s)
    links.record_transfer(A, 1 << 20, 10.0)  # it was congested
    clock.advance(59.0)
    assert links.bytes_per_s(A) < 1 << 20
    clock.advance(1.0)
    assert links.bytes_per_s(A) == LinkRate().bytes_per_s
    links.record_transfer(A, 1 << 20, 0.5)
    assert links.bytes_per_s(A) == 2 << 20  # whatever it was before
