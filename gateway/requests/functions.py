"""Resolution of `NAME` and `NAME:VERSION` to function versions, with the key's rights."""

import re
from dataclasses import dataclass

from gateway.core.contract import ClusterOperations
from gateway.core.errors import Forbidden, ModelNotFound
from registry.clock import Clock
from registry.errors import NotFound
from registry.records.api_key import ApiKey
from registry.records.function import NAME_PATTERN, Function, FunctionVersion
from registry.state import ClusterState

_SPEC = re.compile(rf"(?P<name>{NAME_PATTERN.pattern})(?::(?P<version>[1-9][0-9]{{0,8}}))?")
_INDEX_S = 0.05  # the view folds the whole feed: too much for each request
_RECENT_S = 2.0  # longer than the feed takes to return a change of this gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    until_s: float
    functions: dict[str, Function]
    versions: dict[tuple[str, int], FunctionVersion]
    found: dict[str, FunctionVersion]  # by what requests named, at most the entries of `versions` twice


class FunctionResolver:
    """An index of the cluster's view; Redis is read only for a name that the view lacks.

    The feed may be a moment behind.
    """

    def __init__(self, cluster: ClusterOperations, state: ClusterState, clock: Clock) -> None:
        self._cluster = cluster
        self._state = state
        self._clock = clock
        self._index: _Index | None = None
        self._recent: dict[str, tuple[float, FunctionVersion]] = {}

    def known(self, spec: str, key: ApiKey) -> FunctionVersion | None:
        """Return what `resolve` would, if it was found a moment ago."""
        found = self._fresh().found.get(spec)
        return found if found is not None and may_call(key, found.function) else None

    async def resolve(self, spec: str, key: ApiKey) -> FunctionVersion:
        """Return the version named by `spec`. Raises ModelNotFound, Forbidden."""
        index = self._fresh()
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ModelNotFound(spec)
        name, number = match["name"], match["version"]
        if not may_call(key, name):
            raise Forbidden(f"this key may call other functions, but not {name!r}")
        version = self._known(name, None if number is None else int(number))
        if version is not None:
            index.found[spec] = version
            return version
        try:
            return await self._state.version(name, None if number is None else int(number))
        except NotFound:
            raise ModelNotFound(spec) from None

    def visible(self, key: ApiKey) -> list[tuple[Function, FunctionVersion]]:
        """Return the functions that the key may call, with their current versions, sorted by name."""
        index = self._fresh()
        pairs = []
        for name in sorted(index.functions):
            function = index.functions[name]
            version = index.versions.get((name, function.current))
            if version is not None and may_call(key, name):
                pairs.append((function, version))
        return pairs

    def set_current(self, version: FunctionVersion) -> None:
        """Serve `version` as current before the feed reports it: this gateway has just made it so."""
        self._recent[version.function] = (self._clock.monotonic_s() + _RECENT_S, version)
        self._index = None

    def remove(self, name: str) -> None:
        """Drop a function that was deleted here."""
        self._recent.pop(name, None)
        self._index = None

    def _known(self, name: str, number: int | None) -> FunctionVersion | None:
        index = self._fresh()
        if number is not None:
            return index.versions.get((name, number))
        if recent := self._recent.get(name):
            until_s, version = recent
            if self._clock.monotonic_s() < until_s:
                return version
            del self._recent[name]
        function = index.functions.get(name)
        return None if function is None else index.versions.get((name, function.current))

    def _fresh(self) -> _Index:
        now = self._clock.monotonic_s()
        if self._index is None or now >= self._index.until_s:
            view = self._cluster.view()
            self._index = _Index(
                until_s=now + _INDEX_S,
                functions={function.name: function for function in view.functions},
                versions={(version.function, version.version): version for version in view.versions},
                found={},
            )
        return self._index


def may_call(key: ApiKey, name: str) -> bool:
    """Return whether the key may call the function; a key that names none may call all."""
    return not key.functions or name in key.functions
