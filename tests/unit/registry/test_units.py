"""Durations, sizes, rates and prices as people write and read them."""

import re
from dataclasses import replace

import pytest

from registry.accounting.prices import DEFAULT_RATES, rate_for
from registry.errors import InvalidRecord, NotFound
from registry.units.durations import parse_duration
from registry.units.sizes import parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("1h", 3600),
        ("250ms", 0.25),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("0", 0),
        (" 2D ", 172800),
    ],
)
def test_durations_are_read(text: str, seconds: float):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("90", "no unit (write 90s"),
        ("5x", "unknown unit 'x'"),
        ("1m1h", "larger units come first"),
        ("1m1m", "each once"),
        ("-5s", "use numbers with units"),
        ("5s!", "use numbers with units"),
        ("", "use numbers with units"),
        ("s", "use numbers with units"),
    ],
)
def test_a_bad_duration_is_refused_with_a_reason(text: str, says: str):
    with pytest.raises(InvalidRecord, match=re.escape(says)):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("256MiB", 256 << 20), ("4GB", 4 * 10**9), ("1024", 1024), ("0", 0), ("1.5 GiB", 3 << 29), ("7b", 7)],
)
def test_sizes_are_read(text: str, nbytes: int):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4G", "unknown unit 'g'"),
        ("big", "use a number"),
        ("-1MB", "use a number"),
        ("0.1B", "less than one byte"),
    ],
)
def test_a_bad_size_is_refused_with_a_reason(text: str, says: str):
    with pytest.raises(InvalidRecord, match=re.escape(says)):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [
        ("1mbit", 125_000),
        ("200mbit", 25_000_000),
        ("1gbit", 125_000_000),
        ("100MB/s", 10**8),
        ("1 MiB/s", 1 << 20),
    ],
)
def test_rates_are_read(text: str, bytes_s: int):
    assert parse_rate(text) == bytes_s


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("100MB", "unknown unit 'mb'"),
        ("100", "unknown unit ''"),
        ("0mbit", "at least 1 byte"),
        ("fast", "use a number"),
    ],
)
def test_a_bad_rate_is_refused_with_a_reason(text: str, says: str):
    with pytest.raises(InvalidRecord, match=re.escape(says)):
        parse_rate(text)


@pytest.mark.parametrize(
    ("gpu_type", "rate_id"),
    [
        ("cpu", "cpu-001"),
        ("NVIDIA H100 80GB HBM3", "h100-001"),
        ("NVIDIA A100-SXM4-80GB", "a100-001"),
        ("NVIDIA L40S", "l40s-001"),
        ("NVIDIA L4", "l4-001"),
        ("Some New Accelerator", "gpu-001"),
    ],
)
def test_a_device_has_a_rate(gpu_type: str, rate_id: str):
    assert rate_for(gpu_type, DEFAULT_RATES).id == rate_id


def test_the_greatest_id_of_a_type_is_in_force_and_none_is_an_error():
    dearer = replace(DEFAULT_RATES[0], id="cpu-002", gpu_second_nanos=1)
    assert rate_for("cpu", [dearer, *DEFAULT_RATES]) == dearer
    with pytest.raises(NotFound):
        rate_for("cpu", [rate for rate in DEFAULT_RATES if rate.gpu_type != "cpu"])
