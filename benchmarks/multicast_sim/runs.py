"""Simulated casts of benchmarks.multicast_sim, and the paper's measurements beside them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.harness.records import timed
from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.automatic import LinkFacts, choose_planner
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.topology import NodeTopology
from rdmacast.simulate.link_model import LinkModel
from rdmacast.simulate.plans import simulate

AUTOMATIC = "automatic"
EVEN, JITTER, STRAGGLER = "even", "jitter", "straggler"
CONDITIONS = (EVEN, JITTER, STRAGGLER)
PARAMETER_BYTES = 2  # bfloat16
MODEL_BYTES = {name: int(name[:-1]) * 10**9 * PARAMETER_BYTES for name in ("7B", "13B", "70B")}

# Seconds from one node to eight as λScale's authors recorded them on their cluster (400 Gb/s, H800).
PAPER = "λScale, 1 to 8 nodes"
PAPER_NODES = 8
PAPER_S = {
    "7B": {"λScale": 0.47, "FaaSNet": 0.76, "NCCL": 0.83},
    "13B": {"λScale": 0.80, "FaaSNet": 1.46, "NCCL": 1.22},
    "70B": {"λScale": 9.3, "FaaSNet": 16.3, "NCCL": 12.9},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedNetwork:
    """The parameters of all runs: rates in bytes/s, delays in s, `jitter` and `straggler` as fractions."""

    bytes_per_s: float
    latency_s: float
    overhead_s: float
    jitter: float
    straggler: float
    in_flight: int
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationCase:
    """One simulated cast; `blocks` 0 leaves the count to the automatic planner."""

    planner: str
    model: str
    nodes: int
    sources: int
    blocks: int
    condition: str


@dataclass(slots=True)
class CaseTimings:
    """A case's figures, one per seed; `others_s` is when all but the straggler are complete."""

    seconds: list[float] = field(default_factory=list)
    first_full_s: list[float] = field(default_factory=list)
    others_s: list[float] = field(default_factory=list)


def cases(
    planners: Sequence[str],
    models: Sequence[str],
    nodes: Sequence[int],
    sources: Sequence[int],
    blocks: Sequence[int],
    conditions: Sequence[str],
) -> Iterator[SimulationCase]:
    """Yield the smallest cases first; cases with one plan are adjacent, so that it is made once."""
    for count in sorted(nodes):
        for k in (k for k in sources if k < count):
            for planner in planners:
                for number in [0] if planner == AUTOMATIC else blocks:
                    for model in models:
                        for condition in conditions:
                            if condition == STRAGGLER and count - k < 2:
                                continue  # a straggler needs other targets
                            sizes = {"nodes": count, "sources": k, "blocks": number}
                            yield SimulationCase(planner=planner, model=model, condition=condition, **sizes)


def measure(case: SimulationCase, network: SimulatedNetwork) -> dict[str, Any]:
    """Simulate a case and return its record."""
    nbytes, straggler = MODEL_BYTES[case.model], _straggler(case)
    slow = {straggler: network.straggler} if case.condition == STRAGGLER else {}
    plan, reason = _plan(case, nbytes, network, slow)
    timings = CaseTimings()
    for seed in network.seeds if case.condition != EVEN else network.seeds[:1]:
        links = LinkModel(
            bytes_per_s=network.bytes_per_s,
            latency_s=network.latency_s,
            overhead_s=network.overhead_s,
            jitter=0.0 if case.condition == EVEN else network.jitter,
            slow=slow,
            in_flight=network.in_flight,
            seed=seed,
        )
        run = simulate(plan, links, nbytes / plan.shape.blocks)
        timings.seconds.append(_short(run.seconds))
        timings.first_full_s.append(run.first_full_s)
        others = np.delete(run.arrived_s.max(axis=1), straggler)
        timings.others_s.append(_short(float(others.max())))
    return _record(case, plan, reason, timings, nbytes / network.bytes_per_s)


def paper_records(models: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{system} (from the paper)",
            "params": {"from": PAPER, "simulated": False, "model": model, "nodes": PAPER_NODES, "sources": 1},
            "seconds": [seconds],
            "median_s": seconds,
        }
        for model in models
        for system, seconds in PAPER_S[model].items()
    ]


def _straggler(case: SimulationCase) -> int:
    """Return a target in the middle."""
    return max(case.sources, case.nodes // 2)


def _plan(
    case: SimulationCase, nbytes: int, network: SimulatedNetwork, slow: dict[int, float]
) -> tuple[TransferPlan, str]:
    """Return the plan and the reason for it; only the automatic planner knows the links' rates."""
    if case.planner != AUTOMATIC:
        return _named_plan(case.planner, case.nodes, case.sources, case.blocks), ""
    facts = LinkFacts(
        bytes_per_s=network.bytes_per_s, latency_s=network.latency_s, overhead_s=network.overhead_s
    )
    sites = [
        NodeTopology(bytes_per_s=network.bytes_per_s * slow.get(node, 1.0)) for node in range(case.nodes)
    ]
    chosen = choose_planner(nodes=case.nodes, sources=case.sources, nbytes=nbytes, facts=facts, sites=sites)
    return chosen.plan(case.nodes, tuple(range(case.sources))), chosen.reason


@lru_cache(maxsize=2)
def _named_plan(planner: str, nodes: int, sources: int, blocks: int) -> TransferPlan:
    return PLANNERS[planner].plan(CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=blocks))


def _record(
    case: SimulationCase, plan: TransferPlan, reason: str, timings: CaseTimings, limit_s: float
) -> dict[str, Any]:
    median_s = float(np.median(timings.seconds))
    others_s = float(np.median(timings.others_s)) if case.condition == STRAGGLER else median_s
    first_full_s = float(np.median(timings.first_full_s))
    params: dict[str, Any] = {
        "simulated": True,
        "model": case.model,
        "bytes": MODEL_BYTES[case.model],
        "nodes": case.nodes,
        "sources": case.sources,
        "blocks": plan.shape.blocks,
        "condition": case.condition,
    }
    if reason:
        params |= {"chosen": plan.planner, "reason": reason}
    figures = {
        "others_s": others_s,
        "others_ratio_to_limit": others_s / limit_s,
        "first_full_s": first_full_s,
        "skew_s": median_s - first_full_s,
    }
    row = timed(case.planner, params, timings.seconds, limit_s, **figures)
    short = {name: _short(value) for name, value in row.items() if isinstance(value, float)}
    return {**row, **short, "steps": plan.steps}


def _short(value: float) -> float:
    """Round to six digits: there are about a thousand records."""
    return float(f"{value:.6g}")
