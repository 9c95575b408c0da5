"""When K and V of a moved sequence are fetched, and for how long (pure)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_MISS_TTL_S = 60.0


class KvPolicy(StrEnum):
    """When K and V of moved sequences are fetched."""

    AUTO = "auto"  # with the duration of recomputing them as the deadline
    ALWAYS = "always"
    NEVER = "never"


class PrefillRate:
    """The prefill throughput of one instance: the maximum over its steps.

    Steps that decode, wait or are disturbed say nothing about prefill.
    """

    def __init__(self) -> None:
        self._token_layers_per_s = 0.0

    def __repr__(self) -> str:
        return f"<PrefillRate {self._token_layers_per_s:.0f} tokens x layers / s>"

    def record(self, tokens: int, layers: int, seconds: float) -> None:
        if seconds > 0:
            self._token_layers_per_s = max(self._token_layers_per_s, tokens * layers / seconds)

    def tokens_per_s(self, layers: int) -> float | None:
        """Return the throughput through `layers` layers; None before the first step."""
        return self._token_layers_per_s / layers if self._token_layers_per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miss:
    """The last deadline that was missed; `repeated` within a minute."""

    seconds: float
    repeated: bool
    until_s: float


class MissedDeadlines:
    """Deadlines that transfers missed, by the set of hosts that sent in parallel.

    Only the second miss within a minute counts: at the first, the export may not have been finished. It
    counts for a minute, since the recovery of hosts that are not asked would go unnoticed.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._misses: dict[frozenset[str], _Miss] = {}

    def __repr__(self) -> str:
        return f"<MissedDeadlines {self._misses}>"

    def record(self, hosts: frozenset[str], seconds: float) -> None:
        """Record that a transfer was not complete after `seconds`."""
        now_s = self._now_s()
        self._misses = {one: miss for one, miss in self._misses.items() if miss.until_s > now_s}
        self._misses[hosts] = _Miss(
            seconds=seconds, repeated=hosts in self._misses, until_s=now_s + _MISS_TTL_S
        )

    def forget(self, hosts: frozenset[str]) -> None:
        """Record that a transfer was in time."""
        self._misses.pop(hosts, None)

    def covers(self, hosts: frozenset[str], deadline_s: float) -> bool:
        """Return whether a transfer with that deadline is expected to miss it."""
        miss = self._misses.get(hosts)
        return (
            miss is not None and miss.repeated and miss.until_s > self._now_s() and deadline_s <= miss.seconds
        )
