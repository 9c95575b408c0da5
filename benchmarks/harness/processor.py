"""Processor time of the machine over a run, from /proc/stat."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_IDLE = (3, 4)  # idle, iowait
_STOLEN = 7
_COUNTED = 8  # user nice system idle iowait irq softirq steal; user includes guest time


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Seconds of all processors since boot; `stolen_s` went to other guests of the host."""

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
        """The fraction of all processor time that was used, by any process of the machine."""
        whole_s = self.busy_s + self.idle_s + self.stolen_s
        return self.busy_s / whole_s if whole_s else 0.0


def parse_times(stat: str, ticks_per_s: int) -> ProcessorTimes:
    """Parse the text of /proc/stat."""
    line = next(line for line in stat.splitlines() if line.startswith("cpu "))
    ticks = [int(word) for word in line.split()[1 : 1 + _COUNTED]]
    idle = sum(ticks[index] for index in _IDLE)
    return ProcessorTimes(
        busy_s=(sum(ticks) - idle - ticks[_STOLEN]) / ticks_per_s,
        idle_s=idle / ticks_per_s,
        stolen_s=ticks[_STOLEN] / ticks_per_s,
    )


def process_cpu_s() -> float:
    """Return this process's processor seconds, without kernel work in interrupts."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def read_times() -> ProcessorTimes:
    return parse_times(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
