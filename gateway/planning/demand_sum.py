"""The load of all gateways together. Pure but for the counters that it keeps."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gateway.cluster.state_cache import VersionKey
from gateway.planning.plan import VersionDemand
from gateway.planning.work import TokenLoad
from registry.records.change import VersionLoad

_MAX_COUNTERS = 65536
_MAX_VERSIONS = 4096


class DemandSum:
    """A sum of reports whose counters of arrivals never fall, though gateways come, go and begin anew.

    A version without calls is part of it once it had some, with its counters.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, VersionKey], tuple[int, int]] = {}  # calls, tokens; the oldest first
        self._arrived: dict[VersionKey, tuple[int, int]] = {}  # the same; the least recently used first

    def __repr__(self) -> str:
        return f"<DemandSum of {len(self._arrived)} versions, {len(self._seen)} counters>"

    def update(self, reports: Mapping[str, Iterable[VersionLoad]]) -> dict[VersionKey, VersionDemand]:
        """Return the demand by version; `reports` are those of all gateways, by gateway."""
        found = {key: _idle(*arrived) for key, arrived in self._arrived.items()}
        for gateway, loads in reports.items():
            for load in loads:
                key = VersionKey(load.function, load.version)
                found[key] = _added(found.get(key, VersionDemand()), load, self._count(gateway, key, load))
        return found

    def _count(self, gateway: str, key: VersionKey, load: VersionLoad) -> tuple[int, int]:
        """Return the calls and tokens that have arrived at all gateways.

        They begin with the counters of the first one, which have the usual length of a prompt as their ratio.
        """
        calls, tokens = load.arrived_calls, load.arrived_tokens
        known = self._seen.get((gateway, key))
        if known is None or calls < known[0] or tokens < known[1]:
            # A gateway that is new here, or has begun anew: what waits has just arrived.
            waiting = min(tokens, load.held_tokens + load.prefilling_tokens)
            known = calls - round(waiting * calls / tokens) if tokens else calls, tokens - waiting
        self._seen[gateway, key] = calls, tokens
        if len(self._seen) > _MAX_COUNTERS:
            del self._seen[next(iter(self._seen))]
        total = self._arrived.pop(key, known)
        total = total[0] + calls - known[0], total[1] + tokens - known[1]
        if total[0]:
            self._arrived[key] = total
        if len(self._arrived) > _MAX_VERSIONS:
            del self._arrived[next(iter(self._arrived))]
        return total


def _idle(arrived_calls: int, arrived_tokens: int) -> VersionDemand:
    return VersionDemand(tokens=TokenLoad(arrived_calls=arrived_calls, arrived_tokens=arrived_tokens))


def _added(demand: VersionDemand, load: VersionLoad, arrived: tuple[int, int]) -> VersionDemand:
    tokens, calls = demand.tokens, load.in_flight + load.held
    times = [one for one in (tokens.service_s, load.service_s) if one is not None]
    return VersionDemand(
        in_flight=demand.in_flight + load.in_flight,
        held=demand.held + load.held,
        tokens=replace(
            tokens,
            held_tokens=tokens.held_tokens + load.held_tokens,
            prefilling_tokens=tokens.prefilling_tokens + load.prefilling_tokens,
            kv_tokens=tokens.kv_tokens + load.kv_tokens,
            arrived_calls=arrived[0],
            arrived_tokens=arrived[1],
            service_s=max(times, default=None),
            uncounted=tokens.uncounted + (0 if load.arrived_calls else calls),
        ),
    )
