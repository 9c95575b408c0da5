"""Profiles of emulated accelerators, against values computed by hand and the published sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaleout.profiles import PROFILES, find_profile, kv_tokens, network_bytes_per_s
from invoker.emulated.profiles import HEADER_BYTES, Profile, StepLoad, UnknownProfile
from registry.images.manifest import ALIGNMENT

SEVEN = find_profile("h800-llama2-7b")
THIRTEEN = find_profile("h800-llama2-13b")
SEVENTY = find_profile("h800-llama2-70b")

PROFILE = st.sampled_from(list(PROFILES.values()))
BATCHES = st.builds(
    StepLoad, tokens=st.integers(1, 8192), sequences=st.just(1), context=st.integers(0, 100_000)
)


@pytest.mark.parametrize(
    ("profile", "weights", "layer_weights", "kv_layer_bytes"),
    [
        (SEVEN, 6_738_415_616, 202_383_360, 16_384),
        (THIRTEEN, 13_015_864_320, 317_204_480, 20_480),
        (SEVENTY, 68_976_648_192, 855_654_400, 4_096),  # 8 heads of keys for 64 of queries
    ],
)
def test_sizes_are_those_of_the_published_models(
    profile: Profile, weights: int, layer_weights: int, kv_layer_bytes: int
) -> None:
    assert profile.model.weights == weights
    assert profile.model.layer_weights == layer_weights
    assert profile.kv_layer_bytes == kv_layer_bytes
    assert 0 <= profile.image_bytes - HEADER_BYTES - weights * 2 < ALIGNMENT * len(profile.spans)
    assert weights * 2 < 0.9 * profile.gpus * profile.gpu.memory_bytes


def test_prefill_of_13b_is_computing() -> None:
    """512 tokens: 2 x 317,204,480 x 512 and 4 x 5,120 x 512 x 513 / 2 operations, at 0.55 x 989.4 T/s."""
    flops = 324_817_387_520 + 2_689_597_440
    assert THIRTEEN.layer_s(StepLoad(tokens=512, sequences=1)) == pytest.approx(flops / 544.17e12 + 20e-6)
    head_s = 163_840_000 * 2 / 2.345e12 + 20e-6  # one token: reading the head
    assert THIRTEEN.step_s(StepLoad(tokens=512, sequences=1)) == pytest.approx(
        40 * (flops / 544.17e12 + 20e-6) + head_s
    )
    assert THIRTEEN.step_s(StepLoad(tokens=512, sequences=1)) == pytest.approx(25.03e-3, rel=1e-3)


def test_decoding_of_7b_is_reading() -> None:
    """One token after 511: 404,766,720 bytes of weights and 512 x 16,384 of keys and values at 2.345 TB/s."""
    layer_s = (404_766_720 + 8_388_608) / 2.345e12 + 20e-6
    one = StepLoad(tokens=1, sequences=1, context=511)
    assert SEVEN.layer_s(one) == pytest.approx(layer_s)
    assert SEVEN.step_s(one) == pytest.approx(32 * layer_s + 262_144_000 / 2.345e12 + 20e-6)
    assert 1 / SEVEN.step_s(one) == pytest.approx(156.0, rel=1e-3)


def test_70b_runs_on_four_gpus_that_exchange_each_output_twice() -> None:
    one = StepLoad(tokens=1, sequences=1, context=0)
    reading_s = (855_654_400 * 2 + 4_096) / (4 * 2.345e12)
    exchange_s = 1.5 * 16_384 / 200e9 + 10e-6
    assert SEVENTY.layer_s(one) == pytest.approx(reading_s + 20e-6 + 2 * exchange_s)


@pytest.mark.parametrize(
    ("profile", "network_s", "host_s", "disk_s"),
    [(SEVEN, 0.2695, 0.2106, 2.695), (THIRTEEN, 0.5206, 0.4067, 5.206), (SEVENTY, 2.759, 2.156, 27.59)],
)
def test_transfers_take_what_the_links_give(
    profile: Profile, network_s: float, host_s: float, disk_s: float
) -> None:
    assert profile.image_bytes / network_bytes_per_s(profile) == pytest.approx(network_s, rel=1e-3)
    assert profile.image_bytes / profile.links.host == pytest.approx(host_s, rel=1e-3)
    assert profile.image_bytes / profile.links.disk == pytest.approx(disk_s, rel=1e-3)


@given(profile=PROFILE, scale=st.integers(1, 4000), batch=BATCHES)
def test_a_scale_shrinks_bytes_and_rates_and_no_times(profile: Profile, scale: int, batch: StepLoad) -> None:
    name = next(name for name, known in PROFILES.items() if known is profile)
    small = find_profile(f"{name}/{scale}")
    assert small.layer_s(batch) == profile.layer_s(batch)
    assert small.image_bytes * scale >= profile.image_bytes
    # Rounding and alignment add less than one alignment a span; the header has the same size at every scale.
    most = profile.image_bytes / scale + (ALIGNMENT + 1) * len(profile.spans) + HEADER_BYTES
    assert small.image_bytes <= most
    seconds = profile.image_bytes / network_bytes_per_s(profile)
    assert small.image_bytes / network_bytes_per_s(small) == pytest.approx(seconds, rel=0.02)
    for nbytes in (small.hidden_bytes(7) * scale, small.hidden_bytes(7) * scale - scale):
        assert abs(nbytes - profile.hidden_bytes(7)) <= scale


@given(profile=PROFILE, batch=BATCHES, cut=st.integers(1, 31))
def test_stages_take_together_what_the_whole_takes(profile: Profile, batch: StepLoad, cut: int) -> None:
    layers = profile.model.layers
    apart = profile.stage_s(0, cut, batch) + profile.stage_s(cut, layers, batch)
    assert apart == pytest.approx(profile.step_s(batch))


@given(profile=PROFILE, batch=BATCHES, more=st.integers(1, 1000))
def test_more_work_never_takes_less(profile: Profile, batch: StepLoad, more: int) -> None:
    longer = StepLoad(tokens=batch.tokens + more, sequences=1, context=batch.context)
    farther = StepLoad(tokens=batch.tokens, sequences=1, context=batch.context + more)
    assert profile.layer_s(longer) >= profile.layer_s(batch) <= profile.layer_s(farther)


def test_a_batch_shares_one_reading_of_the_weights() -> None:
    one, many = StepLoad(tokens=1, sequences=1), StepLoad(tokens=32, sequences=32)
    assert THIRTEEN.step_s(many) < 1.1 * THIRTEEN.step_s(one)
    assert kv_tokens(THIRTEEN) == int((72e9 - 26_031_728_640) / (40 * 20_480))


def test_spans_are_those_of_an_image() -> None:
    spans = find_profile("h800-llama2-13b/1000").spans
    assert [span.kind for span in spans] == ["embed", *["layer"] * 40, "head"]
    assert [span.index for span in spans[1:-1]] == list(range(40))
    edges = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1]
    assert all(edge % ALIGNMENT == 0 for edge in edges)


def test_names() -> None:
    assert str(THIRTEEN) == "emulated 1x H800 with Llama-2 13B"
    assert str(find_profile("h800-llama2-70b/500")) == (
        "emulated 4x H800 with Llama-2 70B, bytes and rates 1/500"
    )
    for bad in ("h100", "h800-llama2-7b/", "h800-llama2-7b/0", "h800-llama2-7b/x", ""):
        with pytest.raises(UnknownProfile, match="h800-llama2-7b, h800-llama2-13b"):
            find_profile(bad)
    with pytest.raises(ValueError, match=r"no layers \[3, 3\)"):
        SEVEN.stage_s(3, 3, StepLoad(tokens=1, sequences=1))
