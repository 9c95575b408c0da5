"""Debouncing of growing demand, so that a burst starts together, by one cast. Pure.

A node that joins a running cast has no part in its plan. So a burst, which arrives call by call, waits for a
small part of the time that its model takes to load.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.cluster.state_cache import VersionKey
from gateway.planning.plan import VersionDemand

_COPY_SHARE = 0.02  # of the time that one copy of the image takes
_MAX_S = 0.04  # a decision follows a change of load within 0.1 s
_MIN_S = 1e-3  # a shorter wait is skipped


def settle_s(image_bytes: int, link_bytes_s: float) -> float:
    """Return how long to wait for more calls of a model before it is loaded on more nodes."""
    wait_s = min(_MAX_S, _COPY_SHARE * image_bytes / link_bytes_s)
    return wait_s if wait_s >= _MIN_S else 0.0


class DemandDebouncer:
    """A debouncer: an increase counts `settle_s` after it began, a decrease at once.

    Of a version without demand the first call counts at once, so that a single call does not wait. A new
    controller counts all existing demand.
    """

    def __init__(self, settle_s: Callable[[VersionKey], float]) -> None:
        self._settle_s = settle_s
        # The demand that counts, and since when it rises; None while this gateway does not lead.
        self._known: dict[VersionKey, tuple[VersionDemand, float | None]] | None = None

    def __repr__(self) -> str:
        return f"<DemandDebouncer {self._known}>"

    def reset(self) -> None:
        """Drop all state: another gateway leads."""
        self._known = None

    def debounce(
        self, demand: Mapping[VersionKey, VersionDemand], now: float
    ) -> tuple[dict[VersionKey, VersionDemand], float | None]:
        """Return the demand that counts now, and when to ask again if some is delayed."""
        before, self._known = self._known, {}
        if before is None:
            before = {key: (reported, None) for key, reported in demand.items()}
        next_at: float | None = None
        for key, reported in demand.items():
            known, since = before.get(key, (VersionDemand(), None))
            since = now if since is None else since
            if reported.calls <= known.calls or now >= (until := since + self._settle_s(key)):
                self._known[key] = reported, None
            else:
                self._known[key] = (known if known.calls else replace(known, held=1)), since
                next_at = until if next_at is None else min(next_at, until)
        return {key: counts for key, (counts, _) in self._known.items()}, next_at
