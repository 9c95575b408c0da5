"""Resolution of `NAME` and `NAME:VERSION` to function versions, with the key's rights.

Of a function in a rollout, `NAME` is either of two versions, as the id of the request decides.
"""

import re
from dataclasses import dataclass

from gateway.core.contract import ClusterOperations
from gateway.core.errors import ModelNotFound
from gateway.core.request_context import RequestContext
from gateway.tenants.access import may_call, require_named
from registry.clock import Clock
from registry.errors import NotFound
from registry.records.api_key import ApiKey
from registry.records.change import Snapshot
from registry.records.function import NAME_PATTERN, Function, FunctionVersion
from registry.records.instance import InstanceState
from registry.records.rollout import Rollout, goes_to_candidate, is_shadowed
from registry.state import ClusterState

_SPEC = re.compile(rf"(?P<name>{NAME_PATTERN.pattern})(?::(?P<version>[1-9][0-9]{{0,8}}))?")
_INDEX_S = 0.05  # the view folds the whole feed: too much for each request
_RECENT_S = 2.0  # longer than the feed takes to return a change of this gateway

Callers = frozenset[str] | None  # as Access.callers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    until_s: float
    functions: dict[str, Function]
    versions: dict[tuple[str, int], FunctionVersion]
    found: dict[str, tuple[FunctionVersion, Callers]]  # by what requests named, at most `versions` twice
    candidates: dict[str, tuple[Rollout, FunctionVersion]]  # with a ready instance, by function


class FunctionResolver:
    """An index of the cluster's view; Redis is read only for a name that the view lacks.

    The feed may be a moment behind.
    """

    def __init__(self, cluster: ClusterOperations, state: ClusterState, clock: Clock) -> None:
        self._cluster = cluster
        self._state = state
        self._clock = clock
        self._index: _Index | None = None
        self._recent: dict[str, tuple[float, FunctionVersion, Callers]] = {}

    def known(self, spec: str, key: ApiKey) -> FunctionVersion | None:
        """Return what `resolve` would, if it was found a moment ago."""
        found = self._fresh().found.get(spec)
        if found is None:
            return None
        version, callers = found
        return version if may_call(key, version.function, callers) else None

    def chosen(self, spec: str, context: RequestContext) -> FunctionVersion | None:
        """Return what `choose` would, if it was found a moment ago."""
        version = None if context.pinned_version else self.known(spec, context.caller)
        return None if version is None else self._split(spec, version, context)

    async def choose(self, spec: str, context: RequestContext) -> FunctionVersion:
        """Return the version that a request for `spec` goes to; during a rollout its id decides.

        Records in the context if a copy of it is to go to the candidate. Raises as `resolve`.
        """
        if context.pinned_version:
            pinned = self._fresh().versions.get((spec.partition(":")[0], context.pinned_version))
            if pinned is None:
                raise ModelNotFound(spec)
            return pinned
        return self._split(spec, await self.resolve(spec, context.caller), context)

    def may_be_shadowed(self, request_id: str) -> bool:
        """Return whether a copy of a request is made if it is for the right function."""
        candidates = self._fresh().candidates
        return bool(candidates) and any(is_shadowed(one, request_id) for one, _ in candidates.values())

    def owner(self, name: str) -> str:
        """Return the tenant that a function belongs to, "" for the operator."""
        function = self._fresh().functions.get(name)
        return "" if function is None else function.access.owner

    def _split(self, spec: str, version: FunctionVersion, context: RequestContext) -> FunctionVersion:
        split = self._fresh().candidates.get(spec)  # a name with a version is no key of it
        if split is None or split[0].stable != version.version:
            return version
        rollout, candidate = split
        if goes_to_candidate(rollout, context.request_id):
            return candidate
        if is_shadowed(rollout, context.request_id):
            context.shadow_version = candidate.version
        return version

    async def resolve(self, spec: str, key: ApiKey) -> FunctionVersion:
        """Return the version named by `spec`.

        Raises ModelNotFound, also for a function that the key's tenant may not call, and Forbidden for one
        that the key itself leaves out.
        """
        version = self.known(spec, key)
        if version is not None:
            return version
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ModelNotFound(spec)
        name, number = match["name"], match["version"]
        require_named(key, name)
        found = self._known(name, None if number is None else int(number))
        if found is not None:
            self._fresh().found[spec] = found
            if may_call(key, name, found[1]):
                return found[0]
        # One read for a function that is missing and for another tenant's: time does not tell them apart.
        try:
            head = await self._state.function(name)
            if not may_call(key, name, head.access.callers):
                raise ModelNotFound(spec)
            return await self._state.version(name, head.current if number is None else int(number))
        except NotFound:
            raise ModelNotFound(spec) from None

    def visible(self, key: ApiKey) -> list[tuple[Function, FunctionVersion]]:
        """Return the functions that the key may call, with their current versions, sorted by name."""
        index = self._fresh()
        pairs = []
        for name in sorted(index.functions):
            function = index.functions[name]
            version = index.versions.get((name, function.current))
            if version is not None and may_call(key, name, function.access.callers):
                pairs.append((function, version))
        return pairs

    def set_current(self, function: Function, version: FunctionVersion) -> None:
        """Serve `version` as current before the feed reports it: this gateway has just made it so."""
        until_s = self._clock.monotonic_s() + _RECENT_S
        self._recent[function.name] = (until_s, version, function.access.callers)
        self._index = None

    def remove(self, name: str) -> None:
        """Drop a function that was deleted here."""
        self._recent.pop(name, None)
        self._index = None

    def _known(self, name: str, number: int | None) -> tuple[FunctionVersion, Callers] | None:
        index = self._fresh()
        function = index.functions.get(name)
        callers = None if function is None else function.access.callers
        if recent := self._recent.get(name):
            until_s, version, callers_now = recent
            if self._clock.monotonic_s() >= until_s:
                del self._recent[name]
            elif number is None or number == version.version:
                return version, callers_now
            else:
                callers = callers_now
        if function is None:
            return None
        found = index.versions.get((name, function.current if number is None else number))
        return None if found is None else (found, callers)

    def _fresh(self) -> _Index:
        now = self._clock.monotonic_s()
        if self._index is None or now >= self._index.until_s:
            view = self._cluster.view()
            self._index = _Index(
                until_s=now + _INDEX_S,
                functions={function.name: function for function in view.functions},
                versions={(version.function, version.version): version for version in view.versions},
                found={},
                candidates=_candidates(view),
            )
        return self._index


def _candidates(view: Snapshot) -> dict[str, tuple[Rollout, FunctionVersion]]:
    """Return the rollouts that split requests now, with their candidates.

    A candidate without a ready instance gets none: they would wait for its start.
    """
    rollouts = {
        head.name: head.rollout for head in view.functions if head.rollout is not None and head.rollout.splits
    }
    if not rollouts:
        return {}
    keys = {(name, rollout.plan.candidate) for name, rollout in rollouts.items()}
    ready = {
        (one.function, one.version)
        for one in view.instances
        if one.state is InstanceState.READY and (one.function, one.version) in keys
    }
    return {
        version.function: (rollouts[version.function], version)
        for version in view.versions
        if (version.function, version.version) in ready
    }
