"""Collectors of Prometheus metrics that count without locks: only the event loop counts."""

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LabelledHistogram(Collector):
    """A histogram by label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        if not labels:  # then there is one row, from the start
            self._counts[()] = [0] * (len(bounds) + 1)
        self._sums: Tally[tuple[str, ...]] = Tally()

    def observe(self, labels: tuple[str, ...], value: float, times: int = 1) -> None:
        """Count a value, which was seen so many times."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        counts[bisect_left(self._bounds, value)] += times
        self._sums[labels] += value * times  # type: ignore[assignment]

    def functions(self) -> set[str]:
        """Return the first labels of all rows."""
        return {labels[0] for labels in self._counts}

    def forget(self, functions: Set[str]) -> None:
        """Drop the rows with these first labels."""
        for labels in [labels for labels in self._counts if labels[0] in functions]:
            del self._counts[labels]
            del self._sums[labels]

    def collect(self) -> Iterator[Metric]:
        yield self.family(self._name)

    def family(self, name: str) -> Metric:
        """Return the rows under this name."""
        family = HistogramMetricFamily(name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            family.add_metric(labels, list(zip(names, accumulate(counts), strict=True)), self._sums[labels])
        return family


class FunctionRows(Protocol):
    """Rows of which the first label is a function."""

    def functions(self) -> set[str]: ...

    def forget(self, functions: Set[str]) -> None: ...


class TalliedRows:
    """A tally as FunctionRows."""

    def __init__(self, counts: Tally[tuple[str, ...]]) -> None:
        self._counts = counts

    def functions(self) -> set[str]:
        return {labels[0] for labels in self._counts}

    def forget(self, functions: Set[str]) -> None:
        for labels in [labels for labels in self._counts if labels[0] in functions]:
            del self._counts[labels]


class Tallied(Collector):
    """A counter by label values that others count in, in `parts` of its unit."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        counts: Mapping[tuple[str, ...], int],
        parts: int = 1,
    ) -> None:
        self._name, self._text, self._labels, self._counts = name, text, labels, counts
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count / self._parts)
        yield family
