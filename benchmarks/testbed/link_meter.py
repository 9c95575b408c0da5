"""The bytes over each link of a testbed over time, read from the switch's counters."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.harness.node_launcher import enter
from benchmarks.testbed.plan import TestbedPlan

_COUNTERS = Path("/proc/thread-self/net/dev")  # of the thread's network namespace
_PERIOD_S = 0.1
_SENT_FIELD = 8  # of the fields after an interface's name; received bytes are the first


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """The bytes that each host has received and sent over its link, until `at_s` of the monotonic clock."""

    at_s: float
    received: tuple[int, ...]
    sent: tuple[int, ...]


class LinkMeter:
    """Reads the counters in a thread while entered, and once at the end.

    Raises the error that stopped it, because what it has read is then incomplete.
    """

    def __init__(self, plan: TestbedPlan, period_s: float = _PERIOD_S) -> None:
        self._plan = plan
        self._period_s = period_s
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="link meter")
        self.samples: list[LinkBytes] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None and kind is None:
            raise self._failure

    def _run(self) -> None:
        try:
            enter(self._plan.switch)
            while not self._stop.is_set():
                self.samples.append(self._read())
                self._stop.wait(self._period_s)
            self.samples.append(self._read())
        except Exception as error:  # raised when the block ends
            self._failure = error

    def _read(self) -> LinkBytes:
        found = port_counters(_COUNTERS.read_text())
        ports = [found[self._plan.port(host)] for host in range(self._plan.hosts)]
        # What the switch sends on a port, its host receives.
        sent, received = zip(*ports, strict=True)
        return LinkBytes(at_s=time.monotonic(), received=received, sent=sent)


def port_counters(text: str) -> Mapping[str, tuple[int, int]]:
    """Return the bytes received and sent by interface, from the text of /proc/net/dev."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, fields = line.partition(":")
        counts = fields.split()
        found[name.strip()] = (int(counts[0]), int(counts[_SENT_FIELD]))
    return found
