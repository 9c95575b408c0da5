"""Which function version a name means, for whom."""

import re
from dataclasses import dataclass

from gateway.contract import Cluster
from gateway.errors import Forbidden, ModelNotFound
from registry.api_key import ApiKey
from registry.clock import Clock
from registry.errors import NotFound
from registry.function import NAME_PATTERN, Function, FunctionVersion
from registry.state import ClusterState

_SPEC = re.compile(rf"(?P<name>{NAME_PATTERN.pattern})(?::(?P<version>[1-9][0-9]{{0,8}}))?")
_INDEX_S = 0.05  # the view is a fold of the whole feed: not made anew for every request
_LEARNED_S = 2.0  # longer than the feed takes to bring back what this gateway did itself


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    until_s: float
    functions: dict[str, Function]
    versions: dict[tuple[str, int], FunctionVersion]


class Functions:
    """Resolves `NAME` and `NAME:VERSION` from the cluster's view; asks the state only for a name that
    the view lacks (the feed may be a moment behind)."""

    def __init__(self, cluster: Cluster, state: ClusterState, clock: Clock) -> None:
        self._cluster = cluster
        self._state = state
        self._clock = clock
        self._index: _Index | None = None
        self._learned: dict[str, tuple[float, FunctionVersion]] = {}

    async def resolve(self, spec: str, key: ApiKey) -> FunctionVersion:
        """The version that `spec` means. Raises ModelNotFound, Forbidden."""
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ModelNotFound(spec)
        name, number = match["name"], match["version"]
        if not may_call(key, name):
            raise Forbidden(f"this key may not call function {name!r}")
        version = self._known(name, None if number is None else int(number))
        if version is not None:
            return version
        try:
            return await self._state.version(name, None if number is None else int(number))
        except NotFound:
            raise ModelNotFound(spec) from None

    def visible(self, key: ApiKey) -> list[tuple[Function, FunctionVersion]]:
        """The functions that the key may call, with their current versions, by name."""
        index = self._fresh()
        pairs = []
        for name in sorted(index.functions):
            function = index.functions[name]
            version = index.versions.get((name, function.current))
            if version is not None and may_call(key, name):
                pairs.append((function, version))
        return pairs

    def learn(self, version: FunctionVersion) -> None:
        """Take `version` as current before the feed says so: this gateway has just made it so."""
        self._learned[version.function] = (self._clock.monotonic_s() + _LEARNED_S, version)
        self._index = None

    def forget(self, name: str) -> None:
        """The function was deleted here."""
        self._learned.pop(name, None)
        self._index = None

    def _known(self, name: str, number: int | None) -> FunctionVersion | None:
        index = self._fresh()
        if number is not None:
            return index.versions.get((name, number))
        if learned := self._learned.get(name):
            until_s, version = learned
            if self._clock.monotonic_s() < until_s:
                return version
            del self._learned[name]
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
            )
        return self._index


def may_call(key: ApiKey, name: str) -> bool:
    """Whether the key is for this function (a key that names none is for all)."""
    return not key.functions or name in key.functions
