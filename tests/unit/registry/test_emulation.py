"""The spelling of emulated models and devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.config.emulation import (
    EmulatedDevice,
    EmulatedModel,
    is_emulated,
    mismatch,
    parse_device,
    parse_model,
)
from registry.errors import InvalidRecord

NAMES = st.sampled_from(["h800", "h800-disk", "llama2-7b", "a.b-c"])
DIVISORS = st.integers(1, 100_000)


@given(name=NAMES, scale=DIVISORS, variant=st.integers(0, 999))
def test_models_are_read_as_they_are_written(name: str, scale: int, variant: int) -> None:
    model = EmulatedModel(name=name, scale=scale, variant=variant)
    assert parse_model(str(model)) == model and is_emulated(str(model))


@given(name=NAMES, count=st.integers(1, 99), scale=DIVISORS, slower=DIVISORS)
def test_devices_are_read_as_they_are_written(name: str, count: int, scale: int, slower: int) -> None:
    device = EmulatedDevice(name=name, count=count, scale=scale, slower=slower)
    assert parse_device(str(device)) == device and is_emulated(str(device))


def test_spellings() -> None:
    assert str(EmulatedModel(name="llama2-13b", scale=1000)) == "emulated:llama2-13b/1000"
    assert str(EmulatedModel(name="llama2-13b", variant=3)) == "emulated:llama2-13b@3"
    assert str(EmulatedDevice(name="h800", count=4, scale=1, slower=10)) == "emulated:h800x4/1/10"
    assert str(EmulatedDevice(name="h800")) == "emulated:h800"
    assert parse_device("emulated:h800x4/1000").count == 4
    for bad in ("h800", "emulated:", "emulated:h800/0", "emulated:h800/100001", "emulated:h800/1/2/3"):
        with pytest.raises(InvalidRecord, match="emulated"):
            parse_device(bad)
    for bad in (
        "llama2-7b",
        "emulated:llama2-7b/",
        "emulated:a/1/2",
        "emulated:A",
        "emulated:a b",
        "emulated:a@0",
    ):
        with pytest.raises(InvalidRecord, match="emulated"):
            parse_model(bad)


@pytest.mark.parametrize(
    ("architecture", "device", "reason"),
    [
        ("LlamaForCausalLM", "cpu", ""),
        ("emulated:llama2-7b/10", "emulated:h800/10/5", ""),
        ("emulated:llama2-7b/10@2", "emulated:h800/10/5", ""),
        ("emulated:llama2-7b/10", "cuda:0", "runs on emulated devices only"),
        ("LlamaForCausalLM", "emulated:h800/10", "emulated:h800/10 runs emulated models only"),
        ("emulated:llama2-7b/10", "emulated:h800", "is at 1/10, emulated:h800 at 1/1"),
        ("emulated:nothing at all", "emulated:h800", "is not an emulated model"),
    ],
)
def test_what_runs_where(architecture: str, device: str, reason: str) -> None:
    found = mismatch(architecture, device)
    assert reason in found and bool(found) == bool(reason)
