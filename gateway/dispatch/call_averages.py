"""Averages and counters of the calls of each version at this gateway, which outlast its queue."""

from dataclasses import dataclass

from gateway.cluster.state_cache import VersionKey
from registry.records.change import CallTraffic

_WEIGHT = 0.2  # of the latest call in a moving average
_MAX_VERSIONS = 4096
_UNKNOWN_OUTPUT = 256  # tokens that a call is assumed to generate at most, before any was seen


@dataclass(slots=True)
class CallAverages:
    """The averages of a version's calls, None before the first; `arrived_…` count all so far.

    A call that continues on other replicas arrives once and ends once, whatever moves it.
    Unlike these, which are of calls that generate, `traffic` counts all calls.
    """

    service_s: float | None = None
    output_tokens: float | None = None
    arrived_calls: int = 0
    arrived_tokens: int = 0
    requests: int = 0
    output_tokens_in_all: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    ended: int = 0
    errors: int = 0

    @property
    def traffic(self) -> CallTraffic:
        return CallTraffic(
            requests=self.requests,
            output_tokens=self.output_tokens_in_all,
            first_tokens=self.first_tokens,
            first_token_s=self.first_token_s,
            ended=self.ended,
            errors=self.errors,
        )

    def count_end(self, *, is_error: bool) -> None:
        """Count a call at its end, also one that was refused."""
        self.ended += 1
        self.errors += is_error

    def record(self, service_s: float | None, output_tokens: int) -> None:
        """Add a call at its end: its time on instances (None: pipelines ran some of it), and its output."""
        if service_s is not None:
            self.service_s = _averaged(self.service_s, service_s)
        self.output_tokens = _averaged(self.output_tokens, output_tokens)

    def expected_output(self, max_tokens: int) -> int:
        """Return how many tokens a call is expected to generate."""
        usual = _UNKNOWN_OUTPUT if self.output_tokens is None else self.output_tokens
        return min(max_tokens, round(usual))


class AveragesTable:
    """The averages of all versions, at most 4096."""

    def __init__(self) -> None:
        self._versions: dict[VersionKey, CallAverages] = {}  # the oldest first

    def __repr__(self) -> str:
        return f"<AveragesTable of {len(self._versions)} versions>"

    def traffic(self) -> dict[tuple[str, int], CallTraffic]:
        """Return what this gateway has served of each version."""
        return {key: averages.traffic for key, averages in self._versions.items()}

    def has(self, key: VersionKey) -> bool:
        """Return whether the version has had calls."""
        return key in self._versions

    def of(self, key: VersionKey) -> CallAverages:
        found = self._versions.get(key)
        if found is None:
            found = self._versions[key] = CallAverages()
            if len(self._versions) > _MAX_VERSIONS:
                del self._versions[next(iter(self._versions))]
        return found


def _averaged(known: float | None, latest: float) -> float:
    return latest if known is None else known + _WEIGHT * (latest - known)
