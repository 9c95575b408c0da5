"""What all gateways together have served of each version, in counts that only grow. Pure."""

from collections.abc import Collection, Iterable, Mapping

from registry.records.change import NO_TRAFFIC, CallTraffic, LoadReport

TrafficKey = tuple[str, int]
"""A function and a version of it."""


class TrafficSums:
    """Sums of this gateway's own counts and those that others report, also where a gateway restarts."""

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway
        self._counts: dict[tuple[str, TrafficKey], CallTraffic] = {}  # by gateway, as last reported
        self._updated = False
        self.sums: dict[TrafficKey, CallTraffic] = {}

    def __repr__(self) -> str:
        return f"<TrafficSums of {len(self.sums)} versions>"

    def update(self, own: Mapping[TrafficKey, CallTraffic], reports: Iterable[LoadReport]) -> None:
        """Take in this gateway's counts, which are complete, and the last reports."""
        for key, counts in own.items():
            # What is new among its own was served since the update before.
            self._add(self.gateway, key, counts, since_zero=self._updated)
        self._updated = True
        for report in reports:
            if report.gateway != self.gateway:
                for load in report.loads:
                    self._add(report.gateway, (load.function, load.version), load.traffic, since_zero=False)

    def keep(self, functions: Collection[str]) -> None:
        """Drop the counts of all other functions."""
        for key in [key for key in self.sums if key[0] not in functions]:
            del self.sums[key]
        for place in [place for place in self._counts if place[1][0] not in functions]:
            del self._counts[place]

    def _add(self, gateway: str, key: TrafficKey, counts: CallTraffic, *, since_zero: bool) -> None:
        before = self._counts.get((gateway, key), NO_TRAFFIC if since_zero else None)
        self._counts[gateway, key] = counts
        total = self.sums.get(key, NO_TRAFFIC)
        if before is None:  # whatever another had served before it was first seen is no traffic of now
            self.sums[key] = total
        elif counts is not before:
            base = before if counts.requests >= before.requests else NO_TRAFFIC
            self.sums[key] = total + (counts - base)
