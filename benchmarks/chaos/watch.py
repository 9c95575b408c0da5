"""Memory and descriptors of the processes that live long, over time."""

import asyncio
import csv
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_cluster import Cluster

_SAMPLE_S = 5.0
_WINDOW = 0.1  # of the time watched: what the first and last figures are medians of
_ALLOWED = 1.05
_SLACK_FDS = 2  # of medians: connections of clients, and to Redis, come and go with the load


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process at one moment. What is judged is `anon_bytes`, what it took itself and has not given back:
    pages of files and of shared memory are no memory of its own, and USS and PSS change when others of
    its family are killed."""

    at_s: float
    name: str
    pid: int
    anon_bytes: int
    rss_bytes: int
    uss_bytes: int
    pss_bytes: int
    fds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A process that lived all the time: medians after the first while, and at the end; and what
    descriptors the last sample has that the first has not, by what they are."""

    name: str
    pid: int
    anon_before: float
    anon_after: float
    rss_before: float
    rss_after: float
    fds_before: float
    fds_after: float
    opened: Mapping[str, int]
    closed: Mapping[str, int]

    @property
    def failure(self) -> str:
        """What grew too much, or ""."""
        if self.anon_after > self.anon_before * _ALLOWED:
            return f"memory of {self.name} grew from {self.anon_before:.0f} to {self.anon_after:.0f} bytes"
        if self.fds_after > max(self.fds_before * _ALLOWED, self.fds_before + _SLACK_FDS):
            counts = f"from {self.fds_before:g} to {self.fds_after:g}"
            return f"descriptors of {self.name} grew {counts}: new {self.opened}, gone {self.closed}"
        return ""

    def record(self) -> dict[str, Any]:
        growth = round(self.anon_after / self.anon_before - 1, 4)
        return {**asdict(self), "anon_growth": growth}


class Watch:
    """Looks at every process of a cluster every few seconds."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._began_s = time.monotonic()
        self.samples: list[Sample] = []
        self._open: dict[tuple[float, int], Counter[str]] = {}

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
                anon_bytes = anonymous(process.pid)
                opened = descriptors(process.pid)
            except (psutil.Error, OSError):
                continue  # killed just now
            at_s = round(time.monotonic() - self._began_s, 1)
            self._open[at_s, process.pid] = opened
            found.append(
                Sample(
                    at_s=at_s,
                    name=name,
                    pid=process.pid,
                    anon_bytes=anon_bytes,
                    rss_bytes=memory.rss,
                    uss_bytes=memory.uss,
                    pss_bytes=memory.pss,
                    fds=opened.total(),
                )
            )
        return found

    def growths(self, after: float, until: float) -> list[Growth]:
        """Of each process that was there from the one moment to the other (`time.monotonic`)."""
        after_s, end_s = after - self._began_s, until - self._began_s
        window_s = max(_WINDOW * (end_s - after_s), 3 * _SAMPLE_S)
        found = []
        for name, pid in sorted({(one.name, one.pid) for one in self.samples}):
            mine = [one for one in self.samples if (one.name, one.pid) == (name, pid) and one.at_s < end_s]
            first = [one for one in mine if after_s <= one.at_s < after_s + window_s]
            last = [one for one in mine if one.at_s > end_s - window_s]
            if first and last and mine[0].at_s <= after_s:
                then, now = (self._open[one.at_s, pid] for one in (first[0], last[-1]))
                found.append(_growth(name, pid, first, last, dict(now - then), dict(then - now)))
        return found

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Sample)])
            writer.writeheader()
            writer.writerows(asdict(one) for one in self.samples)


def anonymous(pid: int) -> int:
    """Bytes of a process's memory that is of no file and not shared. Raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def descriptors(pid: int) -> Counter[str]:
    """What a process has open, by kind: a file's path, or socket, pipe and so on. Raises OSError."""
    found: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed just now
            found[str(fd.readlink()).partition(":[")[0]] += 1
    return found


def _growth(
    name: str,
    pid: int,
    first: Sequence[Sample],
    last: Sequence[Sample],
    opened: Mapping[str, int],
    closed: Mapping[str, int],
) -> Growth:
    return Growth(
        name=name,
        pid=pid,
        anon_before=statistics.median(one.anon_bytes for one in first),
        anon_after=statistics.median(one.anon_bytes for one in last),
        rss_before=statistics.median(one.rss_bytes for one in first),
        rss_after=statistics.median(one.rss_bytes for one in last),
        fds_before=statistics.median(one.fds for one in first),
        fds_after=statistics.median(one.fds for one in last),
        opened=opened,
        closed=closed,
    )
