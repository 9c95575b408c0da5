"""Scaling by load at a constant rate of random arrivals: it does not flap, also where KV cache is scarce."""

import math
import random
from itertools import pairwise

import pytest

from benchmarks.harness.traces import TraceRequest
from benchmarks.scaleout.profiles import find_profile
from benchmarks.trace_sim.modes import MODES
from benchmarks.trace_sim.simulation import SimulationSettings, simulate
from benchmarks.trace_sim.starts import Overheads
from registry.records.function import Scaling, ScalingMode

SETTLED_S, UNTIL_S = 60.0, 660.0
MAX_PAIRS = 2
SPREAD = 0.8  # of the logarithms of lengths


def lengths(draw: random.Random, mean: float, most: int) -> int:
    return min(most, max(1, int(draw.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))


def steady(rate: float, seed: int) -> list[TraceRequest]:
    """Return Poisson arrivals with lognormal prompts and outputs."""
    draw, at_s, found = random.Random(seed), 0.0, list[TraceRequest]()
    while (at_s := at_s + draw.expovariate(rate)) < UNTIL_S:
        found.append(TraceRequest(at_s, lengths(draw, 800, 3500), lengths(draw, 150, 500)))
    return found


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kv_tokens", [16_000, 30_000, None])
@pytest.mark.parametrize("rate", [3.0, 6.0, 10.0, 15.0])
def test_ten_minutes_at_a_constant_rate_have_few_changes(
    rate: float, kv_tokens: int | None, seed: int
) -> None:
    settings = SimulationSettings(
        profile=find_profile("h800-llama2-13b"),
        mode=MODES["hypercast"],
        scaling=Scaling(policy=ScalingMode.LOAD, min_instances=1),
        nodes=12,
        overheads=Overheads(),
        host_images=1,
        host_ttl_s=math.inf,
        kv_tokens=kv_tokens,
    )
    requests = steady(rate, seed)
    figures = simulate(settings, [iter(requests)], UNTIL_S).figures
    counts = [count for at_s, count in figures.instances if SETTLED_S < at_s < UNTIL_S]
    steps = [after - before for before, after in pairwise(counts)]
    pairs = min(sum(step > 0 for step in steps), sum(step < 0 for step in steps))
    print(f"{pairs} pairs, {figures.gpu_s / UNTIL_S:.2f} instances, {figures.within} of {figures.requests}")
    assert pairs <= MAX_PAIRS
    assert figures.within / figures.requests > 0.99
