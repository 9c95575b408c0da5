"""A growing demand is taken up once it has settled: what comes at once starts together, by one cast (pure).

A node that joins a cast under way has no part in its plan. So a burst, of which a gateway hears call by call,
waits for a small part of what its models take to load.
"""

from collections.abc import Callable, Mapping

from gateway.directory import VersionKey
from gateway.plan import KeyDemand

_OF_A_COPY = 0.02
_MOST_S = 0.1
_LEAST_S = 1e-3  # less is not worth another step


def settle_s(image_bytes: int, link_bytes_s: float) -> float:
    """For how long more calls of a model are waited for before it is moved."""
    wait_s = min(_MOST_S, _OF_A_COPY * image_bytes / link_bytes_s)
    return wait_s if wait_s >= _LEAST_S else 0.0


class Rising:
    """What is more than before counts `settle_s` after it began to rise, what is less at once; where nothing
    was asked for, one call counts at once, so that who is alone does not wait. Whoever begins to lead counts
    what it finds."""

    def __init__(self, settle_s: Callable[[VersionKey], float]) -> None:
        self._settle_s = settle_s
        # What counts, and since when it rises; None while this one does not lead.
        self._known: dict[VersionKey, tuple[KeyDemand, float | None]] | None = None

    def __repr__(self) -> str:
        return f"<Rising {self._known}>"

    def rest(self) -> None:
        """Another one leads: what counted here is no more."""
        self._known = None

    def taken_up(
        self, demand: Mapping[VersionKey, KeyDemand], now: float
    ) -> tuple[dict[VersionKey, KeyDemand], float | None]:
        """What counts now, and when to ask again, if something is put off."""
        before, self._known = self._known, {}
        if before is None:
            before = {key: (asked, None) for key, asked in demand.items()}
        next_at: float | None = None
        for key, asked in demand.items():
            known, since = before.get(key, (KeyDemand(), None))
            since = now if since is None else since
            if asked.calls <= known.calls or now >= (until := since + self._settle_s(key)):
                self._known[key] = asked, None
            else:
                self._known[key] = (known if known.calls else KeyDemand(held=1)), since
                next_at = until if next_at is None else min(next_at, until)
        return {key: counts for key, (counts, _) in self._known.items()}, next_at
