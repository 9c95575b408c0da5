"""Memory and descriptors of long-lived processes over time."""

import asyncio
import csv
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.local_platform import LocalPlatform
from benchmarks.harness.processor import open_descriptors

_SAMPLE_S = 5.0
_WINDOW = 0.1  # fraction of the time for the first and last medians
_ALLOWED = 1.05
_SLACK_FDS = 2  # client and Redis connections vary with the load


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """One process at one time.

    `anon_bytes`, memory that it allocated and has not returned, is what is checked: file and shared pages
    are not its own, and USS and PSS change when related processes are killed.
    """

    at_s: float
    name: str
    pid: int
    anon_bytes: int
    rss_bytes: int
    uss_bytes: int
    pss_bytes: int
    fds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceGrowth:
    """A process that lived throughout: medians after start-up and at the end.

    `opened` and `closed` count descriptors of only the last or only the first sample, by kind.
    """

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
        """The excessive growth, or ""."""
        if self.anon_after > self.anon_before * _ALLOWED:
            return f"memory of {self.name} grew from {self.anon_before:.0f} to {self.anon_after:.0f} bytes"
        if self.fds_after > max(self.fds_before * _ALLOWED, self.fds_before + _SLACK_FDS):
            counts = f"from {self.fds_before:g} to {self.fds_after:g}"
            return f"descriptors of {self.name} grew {counts}: new {self.opened}, closed {self.closed}"
        return ""

    def record(self) -> dict[str, Any]:
        growth = round(self.anon_after / self.anon_before - 1, 4)
        return {**asdict(self), "anon_growth": growth}


class ProcessMonitor:
    """Samples every process of a platform every few seconds."""

    def __init__(self, platform: LocalPlatform) -> None:
        self._platform = platform
        self._started_s = time.monotonic()
        self.samples: list[ProcessSample] = []
        self._open: dict[tuple[float, int], Counter[str]] = {}

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.samples += await asyncio.to_thread(self._take_samples)
            await asyncio.sleep(_SAMPLE_S)

    def _take_samples(self) -> list[ProcessSample]:
        found = []
        for name, process in self._platform.processes().items():
            try:
                memory = process.memory_full_info()
                anon_bytes = anonymous_bytes(process.pid)
                opened = open_descriptors(process.pid)
            except (psutil.Error, OSError):
                continue  # just killed
            at_s = round(time.monotonic() - self._started_s, 1)
            self._open[at_s, process.pid] = opened
            found.append(
                ProcessSample(
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

    def growths(self, after: float, until: float) -> list[ResourceGrowth]:
        """Return the growth of each process that lived from `after` to `until` (`time.monotonic`)."""
        after_s, end_s = after - self._started_s, until - self._started_s
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
            writer = csv.DictWriter(file, [field.name for field in fields(ProcessSample)])
            writer.writeheader()
            writer.writerows(asdict(one) for one in self.samples)


def anonymous_bytes(pid: int) -> int:
    """Return a process's private anonymous memory in bytes. Raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _growth(
    name: str,
    pid: int,
    first: Sequence[ProcessSample],
    last: Sequence[ProcessSample],
    opened: Mapping[str, int],
    closed: Mapping[str, int],
) -> ResourceGrowth:
    return ResourceGrowth(
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
