"""Estimates of what a request costs: from what the version's requests took of late."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.tenants.cost_estimates import CostEstimates, WorkBound
from registry.accounting.prices import DEFAULT_RATES
from registry.records.usage import PriceRate, cost_nanos

VERSION = ("coder", 1)
RATE = PriceRate(
    id="cpu-002",
    gpu_type="cpu",
    gpu_second_nanos=50_000,
    request_nanos=200,
    prompt_mtoken_nanos=1_000_000,
    completion_mtoken_nanos=5_000_000,
)
WORKS = st.builds(
    WorkBound,
    calls=st.integers(1, 128),
    prompt_tokens=st.integers(0, 10**6),
    completion_tokens=st.integers(0, 10**6),
)


def nanos(estimates: CostEstimates, work: WorkBound, rates: Sequence[PriceRate]) -> int:
    estimate = estimates.estimate(VERSION, work, rates)
    return 0 if estimate is None else estimate.parts.total


@given(work=WORKS, used_us=st.integers(0, 10**12))
def test_the_same_work_again_is_estimated_at_what_it_cost(work: WorkBound, used_us: int) -> None:
    estimates = CostEstimates()
    estimates.learn(VERSION, "cpu", used_us, work)
    cost = cost_nanos(RATE, -(-used_us // 1000), work.prompt_tokens, work.completion_tokens)
    assert abs(nanos(estimates, work, [RATE]) - cost) <= RATE.gpu_second_nanos // 1000 + cost * 1e-9


def test_longer_requests_count_at_once_and_shorter_ones_slowly() -> None:
    estimates, work = CostEstimates(), WorkBound(completion_tokens=99)
    unknown = nanos(estimates, work, DEFAULT_RATES)
    assert unknown > 0 and estimates.gpu_type(VERSION) is None
    assert estimates.estimate(VERSION, work, ()) is None  # a device without a price
    costs = []
    for used_us in (1_000_000, 9_000_000, 1_000_000):
        estimates.learn(VERSION, "cpu", used_us, work)
        costs.append(nanos(estimates, work, [RATE]))
    assert costs[0] < costs[2] < costs[1]
    assert estimates.gpu_type(VERSION) == "cpu"


def test_the_number_of_versions_is_bounded() -> None:
    estimates = CostEstimates()
    for number in range(5000):
        estimates.learn(("coder", number), "cpu", 1, WorkBound())
    assert estimates.gpu_type(("coder", 0)) is None and estimates.gpu_type(("coder", 4999)) == "cpu"
