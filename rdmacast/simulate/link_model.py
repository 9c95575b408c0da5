"""The input and the result of a simulated cast (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """The network of a simulation.

    Every port moves `bytes_per_s` each way, a block takes `latency_s` on its way and `overhead_s` of both
    ports, and its time at the ports grows by up to the share `jitter`, drawn anew for each block. `slow`
    gives nodes whose rate is another share of it (a straggler: 0.25), `pairs` a latency and a rate that
    hold between two nodes, source first. Scale-up domains move blocks in no time. `in_flight` is how many
    pulls a target has under way.
    """

    bytes_per_s: float = 1.0
    latency_s: float = 0.0
    overhead_s: float = 0.0
    jitter: float = 0.0
    slow: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    pairs: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    in_flight: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        rates = (self.bytes_per_s, *self.slow.values(), *(rate for _, rate in self.pairs.values()))
        if not all(rate > 0 for rate in rates):
            raise ValueError("rates must be above 0")
        delays = (self.latency_s, self.overhead_s, self.jitter, *(delay for delay, _ in self.pairs.values()))
        if not all(delay >= 0 for delay in delays):
            raise ValueError("latencies, overheads and jitter must be 0 or more")
        if self.in_flight < 1:
            raise ValueError("a target needs at least 1 pull in flight")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Simulation:
    """The time at which each node held each block, in seconds; sources from 0 on."""

    arrived_s: Seconds  # [node, block]
    sources: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Simulation({self.seconds:.6g} s, first full after {self.first_full_s:.6g} s)"

    @property
    def complete_s(self) -> Seconds:
        """The time at which each target held everything, in seconds."""
        targets = np.delete(self.arrived_s, list(self.sources), axis=0)
        return np.asarray(targets.max(axis=1))

    @property
    def seconds(self) -> float:
        return float(self.complete_s.max(initial=0.0))

    @property
    def first_full_s(self) -> float:
        complete_s = self.complete_s
        return float(complete_s.min()) if len(complete_s) else 0.0


def port_seconds(links: LinkModel, nodes: int, block_bytes: float) -> Seconds:
    """Return how long each node's port is busy with a block, jitter aside, in seconds."""
    rates = np.full(nodes, links.bytes_per_s)
    for node, share in links.slow.items():
        rates[node] *= share
    return np.asarray(links.overhead_s + block_bytes / rates)


def stretches(links: LinkModel, transfers: int) -> Seconds:
    """Return the factor by which jitter lengthens each transfer's time at the ports."""
    if not links.jitter:
        return np.ones(transfers)
    return np.asarray(1.0 + links.jitter * np.random.default_rng(links.seed).random(transfers))
