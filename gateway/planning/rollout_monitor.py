"""What the versions in rollouts have served over each one's window, from the counts of all gateways. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.cluster.traffic_sums import TrafficKey, TrafficSums
from gateway.core.contract import RolloutHealth
from registry.records.change import NO_TRAFFIC, CallTraffic, LoadReport
from registry.records.rollout import Rollout

_SAMPLES = 120  # of a window
_MIN_STEP_S = 0.25


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    candidate: CallTraffic
    stable: CallTraffic


@dataclass(slots=True)
class _Watched:
    """A rollout with samples of its window, the oldest first, and the failed starts before it."""

    id: str
    failure_serial: int
    samples: deque[_Sample] = field(default_factory=deque)


class RolloutMonitor:
    """The health of the rollouts in progress; every gateway has one, so that any can show or judge it."""

    def __init__(self, gateway: str) -> None:
        self._sums = TrafficSums(gateway)
        self._watched: dict[str, _Watched] = {}

    def __repr__(self) -> str:
        return f"<RolloutMonitor of {sorted(self._watched)}>"

    def update(
        self,
        cache: ClusterStateCache,
        own: Mapping[TrafficKey, CallTraffic],
        reports: Iterable[LoadReport],
        now_s: float,
    ) -> None:
        """Take in the counts of now (monotonic)."""
        for function in [one for one in self._watched if one not in cache.rollouts]:
            del self._watched[function]
        if not cache.rollouts:
            if self._sums.sums:
                self._sums = TrafficSums(self._sums.gateway)
            return
        judged = set(cache.judged_versions())
        self._sums.keep(cache.rollouts)
        self._sums.update({key: counts for key, counts in own.items() if key in judged}, reports)
        for function, rollout in cache.rollouts.items():
            watched = self._watched.get(function)
            if watched is None or watched.id != rollout.id:
                watched = self._watched[function] = _Watched(rollout.id, cache.backoff.serial)
            self._sample(watched, function, rollout, now_s)

    def health(self, cache: ClusterStateCache, function: str, rollout: Rollout) -> RolloutHealth:
        """Return the health of a rollout as of the last update."""
        watched = self._watched.get(function)
        if watched is None or watched.id != rollout.id or not watched.samples:
            return RolloutHealth()
        key = VersionKey(function, rollout.plan.candidate)
        failures = cache.backoff.failures(key, watched.failure_serial)
        first = watched.samples[0]
        return RolloutHealth(
            candidate=self._sum(function, rollout.plan.candidate) - first.candidate,
            stable=self._sum(function, rollout.stable) - first.stable,
            ready=len(cache.ready(key)),
            failed_starts=len(failures),
            start_error=failures[-1].error if failures else "",
        )

    def _sample(self, watched: _Watched, function: str, rollout: Rollout, now_s: float) -> None:
        """Keep the counts of now, a sample for each part of the window, and the last one before it."""
        window_s, samples = rollout.plan.limits.window_s, watched.samples
        if not samples or now_s - samples[-1].at_s >= max(_MIN_STEP_S, window_s / _SAMPLES):
            candidate = self._sum(function, rollout.plan.candidate)
            samples.append(_Sample(now_s, candidate, self._sum(function, rollout.stable)))
        while len(samples) > 1 and samples[1].at_s <= now_s - window_s:
            samples.popleft()

    def _sum(self, function: str, number: int) -> CallTraffic:
        return self._sums.sums.get((function, number), NO_TRAFFIC)
