"""Memory and descriptors of the processes that live long, over time."""

import asyncio
import csv
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_cluster import Cluster

_SAMPLE_S = 5.0
_WINDOW = 0.1  # of the time watched: what the first and last figures are medians of
_ALLOWED = 1.05
_SLACK_FDS = 10  # connections of clients, and to Redis, come and go with the load


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process at one moment. What is judged is `rss_bytes`: what else is shared with it, and so its
    USS and PSS, changes when others of its family are killed."""

    at_s: float
    name: str
    pid: int
    rss_bytes: int
    uss_bytes: int
    pss_bytes: int
    fds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A process that lived all the time: medians after the first while, and at the end."""

    name: str
    pid: int
    rss_before: float
    rss_after: float
    fds_before: float
    fds_after: float

    @property
    def failure(self) -> str:
        """What grew too much, or ""."""
        if self.rss_after > self.rss_before * _ALLOWED:
            return f"memory of {self.name} grew from {self.rss_before:.0f} to {self.rss_after:.0f} bytes"
        if self.fds_after > max(self.fds_before * _ALLOWED, self.fds_before + _SLACK_FDS):
            return f"descriptors of {self.name} grew from {self.fds_before:g} to {self.fds_after:g}"
        return ""

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "rss_growth": round(self.rss_after / self.rss_before - 1, 4)}


class Watch:
    """Looks at every process of a cluster every few seconds."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._began_s = time.monotonic()
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.samples += await asyncio.to_thread(self._look)
            await asyncio.sleep(_SAMPLE_S)

    def _look(self) -> list[Sample]:
        found = []
        for name, process in self._cluster.processes().items():
            try:
                memory = process.memory_full_info()
                fds = process.num_fds()
            except psutil.Error:
                continue  # killed just now
            at_s = round(time.monotonic() - self._began_s, 1)
            found.append(
                Sample(
                    at_s=at_s,
                    name=name,
                    pid=process.pid,
                    rss_bytes=memory.rss,
                    uss_bytes=memory.uss,
                    pss_bytes=memory.pss,
                    fds=fds,
                )
            )
        return found

    def growths(self, after_s: float) -> list[Growth]:
        """Of each process that was there from `after_s` on to the end."""
        if not self.samples:
            return []
        end_s = self.samples[-1].at_s
        window_s = max(_WINDOW * end_s, 3 * _SAMPLE_S)
        found = []
        for name, pid in sorted({(one.name, one.pid) for one in self.samples}):
            mine = [one for one in self.samples if (one.name, one.pid) == (name, pid)]
            first = [one for one in mine if after_s <= one.at_s < after_s + window_s]
            last = [one for one in mine if one.at_s > end_s - window_s]
            if mine[0].at_s <= after_s and first and last:
                found.append(_growth(name, pid, first, last))
        return found

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Sample)])
            writer.writeheader()
            writer.writerows(asdict(one) for one in self.samples)


def _growth(name: str, pid: int, first: Sequence[Sample], last: Sequence[Sample]) -> Growth:
    return Growth(
        name=name,
        pid=pid,
        rss_before=statistics.median(one.rss_bytes for one in first),
        rss_after=statistics.median(one.rss_bytes for one in last),
        fds_before=statistics.median(one.fds for one in first),
        fds_after=statistics.median(one.fds for one in last),
    )
