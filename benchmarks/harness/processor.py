"""What the machine and its processes use: processor time and descriptors."""

import resource
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

SATURATED = 0.95


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Seconds of all processors since boot; `stolen_s` went to other guests while work waited for it."""

    busy_s: float
    idle_s: float
    stolen_s: float

    def since(self, earlier: "ProcessorTimes") -> "ProcessorTimes":
        return ProcessorTimes(
            busy_s=self.busy_s - earlier.busy_s,
            idle_s=self.idle_s - earlier.idle_s,
            stolen_s=self.stolen_s - earlier.stolen_s,
        )

    @property
    def share(self) -> float:
        """The fraction of all processor time that was used, by any process of the machine, or stolen."""
        taken_s = self.busy_s + self.stolen_s
        whole_s = taken_s + self.idle_s
        return taken_s / whole_s if whole_s else 0.0


def saturated_share(reads: Sequence[ProcessorTimes]) -> float:
    """Return the fraction of the intervals between reads in which hardly any processor time was left."""
    uses = [later.since(earlier).share for earlier, later in pairwise(reads)]
    return sum(use >= SATURATED for use in uses) / max(1, len(uses))


def process_cpu_s() -> float:
    """Return this process's processor seconds, without kernel work in interrupts."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def read_times() -> ProcessorTimes:
    """Return the times of the machine."""
    return processor_times(psutil.cpu_times())


def processor_times(now: Any) -> ProcessorTimes:
    """Return the sums of psutil's times; the time of guests counts once, as it is in that of users."""
    return ProcessorTimes(
        busy_s=now.user + now.nice + now.system + now.irq + now.softirq,
        idle_s=now.idle + now.iowait,
        stolen_s=now.steal,
    )


def open_descriptors(pid: int) -> Counter[str]:
    """Count a process's descriptors by kind: a file's path, socket, pipe and others. Raises OSError."""
    found: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # just closed
            found[str(fd.readlink()).partition(":[")[0]] += 1
    return found
