"""The cover of all layers by ranges of nodes: fewest stages first, then balanced (pure)."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from gateway.live.model_layers import ModelLayers

_MAX_TRIES = 400  # partial covers examined before the search gives up
_HALVINGS = 12  # bisection steps for the cost of the slowest stage


@dataclass(frozen=True, kw_only=True)
class StageCandidate:
    """A node that could run a stage, `speed` times as fast as a usual one.

    `ends[p]` is the end of the run of layers that it holds from p on.
    """

    node: str
    group: int
    ends: tuple[int, ...]
    speed: float = 1.0

    @property
    def alike(self) -> tuple[int, float, tuple[int, ...]]:
        """The equivalence class: such candidates are interchangeable."""
        return self.group, self.speed, self.ends


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRange:
    """`node` runs the layers `[first, last)`."""

    node: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class StageCover:
    """Stages in layer order, each layer and each node once.

    `slowest` is the highest cost of a stage, divided by its node's speed.
    """

    stages: tuple[StageRange, ...]
    slowest: float

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        return tuple(stage.node for stage in self.stages)


def fewest_hops(layers: ModelLayers, candidates: Sequence[StageCandidate], most: int) -> StageCover | None:
    """Return the cover of the fewest stages, at most `most`, the most balanced of these; None without one."""
    shortest = _Search(layers, candidates, inf).run(most)
    return None if shortest is None else _balanced(layers, candidates, len(shortest), shortest)


def most_even(layers: ModelLayers, candidates: Sequence[StageCandidate], most: int) -> StageCover | None:
    """Return the most balanced cover of at most `most` stages; None without one."""
    shortest = _Search(layers, candidates, inf).run(most)
    return None if shortest is None else _balanced(layers, candidates, most, shortest)


def _balanced(
    layers: ModelLayers, candidates: Sequence[StageCandidate], most: int, known: list[StageRange]
) -> StageCover:
    """Bisect the cost of the slowest stage; `known` is some cover."""
    speeds = {candidate.node: candidate.speed for candidate in candidates}
    held = {candidate.node: candidate.ends for candidate in candidates}
    best, high = known, _slowest(layers, known, speeds)
    fastest = max(speeds.values())
    low = max(max(layers.costs) / fastest, layers.until[-1] / (fastest * most)) * (1 - 1e-9)
    # The minimum is often feasible, and a search that must fail costs the most.
    limit = low * (1 + 2e-9)
    for _ in range(_HALVINGS):
        if high <= low * (1 + 1e-6):
            break
        found = _Search(layers, candidates, limit).run(most)
        if found is None:
            low = limit
        else:
            best, high = found, min(limit, _slowest(layers, found, speeds))
        limit = (low + high) / 2
    stages = _evened(layers, best, held, speeds)
    return StageCover(stages=tuple(stages), slowest=_slowest(layers, stages, speeds))


def _slowest(layers: ModelLayers, stages: Sequence[StageRange], speeds: dict[str, float]) -> float:
    until = layers.until
    return max((until[stage.last] - until[stage.first]) / speeds[stage.node] for stage in stages)


def _evened(
    layers: ModelLayers, stages: list[StageRange], held: dict[str, tuple[int, ...]], speeds: dict[str, float]
) -> list[StageRange]:
    """Move each border to where its two stages are most balanced, as far as both hold the layers."""
    until, edges = layers.until, [0, *(stage.last for stage in stages)]
    for _ in stages:
        for i in range(1, len(stages)):
            before, after = stages[i - 1].node, stages[i].node
            start, end = edges[i - 1], edges[i + 1]
            lowest = next(p for p in range(start + 1, edges[i] + 1) if held[after][p] >= edges[i])
            borders = range(lowest, min(end - 1, held[before][start]) + 1)
            slower = [
                max((until[one] - until[start]) / speeds[before], (until[end] - until[one]) / speeds[after])
                for one in borders
            ]
            edges[i] = borders[slower.index(min(slower))]
    return [StageRange(node=one.node, first=edges[i], last=edges[i + 1]) for i, one in enumerate(stages)]


class _Search:
    """An iterative-deepening search for a cover in which no stage costs more than `limit`."""

    def __init__(self, layers: ModelLayers, candidates: Sequence[StageCandidate], limit: float) -> None:
        self._layers = layers
        self._kinds: dict[tuple[int, float, tuple[int, ...]], list[StageCandidate]] = {}
        for candidate in candidates:
            self._kinds.setdefault(candidate.alike, []).append(candidate)
        self._reach = [list(self._reaches(kind, limit)) for kind in self._kinds.values()]
        self._members = list(self._kinds.values())
        self._taken = [0] * len(self._members)
        self._tries = _MAX_TRIES
        self._hops = self._least_hops()

    def run(self, most: int) -> list[StageRange] | None:
        hops = self._hops[0]
        while hops <= most and self._tries > 0:
            found = self._from(0, hops, frozenset())
            if found is not None:
                return found
            hops += 1
        return None

    def _reaches(self, kind: list[StageCandidate], limit: float) -> Iterator[int]:
        until, one = self._layers.until, kind[0]
        if limit == inf:
            yield from one.ends
            return
        for first, end in enumerate(one.ends):
            yield min(end, bisect_right(until, until[first] + limit * one.speed) - 1)

    def _least_hops(self) -> list[float]:
        """Return lower bounds of the stages for the layers `[p, n)`, as if a node could run several."""
        count = len(self._layers)
        hops: list[float] = [inf] * count + [0]  # infinite: no candidate holds some layer
        for first in reversed(range(count)):
            furthest = max((reach[first] for reach in self._reach), default=first)
            if furthest > first:
                hops[first] = 1 + hops[furthest]
        return hops

    def _from(self, first: int, hops: float, groups: frozenset[int]) -> list[StageRange] | None:
        """Return stages for the layers `[first, n)`, of unused groups where possible."""
        if first == len(self._layers):
            return []
        self._tries -= 1
        if hops == 0 or self._tries <= 0:
            return None
        for kind in sorted(self._open(first, hops), key=lambda k: self._preference(k, first, groups)):
            one, last = self._members[kind][self._taken[kind]], self._reach[kind][first]
            self._taken[kind] += 1
            rest = self._from(last, hops - 1, groups | {one.group})
            self._taken[kind] -= 1
            if rest is not None:
                return [StageRange(node=one.node, first=first, last=last), *rest]
        return None

    def _open(self, first: int, hops: float) -> Iterator[int]:
        for kind, reach in enumerate(self._reach):
            far_enough = reach[first] > first and self._hops[reach[first]] <= hops - 1
            if far_enough and self._taken[kind] < len(self._members[kind]):
                yield kind

    def _preference(self, kind: int, first: int, groups: frozenset[int]) -> tuple[bool, int, int]:
        one = self._members[kind][0]
        # Of equal reach the node that holds least: the others are more useful elsewhere.
        return one.group in groups, -self._reach[kind][first], sum(one.ends)
