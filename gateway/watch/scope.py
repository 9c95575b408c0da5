"""Which entries a key may see: those of the whole cluster, or those of its tenant's functions. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.core.rights import Right, may
from registry.records.api_key import ApiKey
from registry.records.function import Function


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchScope:
    """What watchers with equal scopes see alike: everything, or `tenant`'s functions.

    `only` are names of functions to which a key is limited, none for all.
    """

    tenant: str = ""
    only: frozenset[str] = frozenset()
    everything: bool = False

    def names(self, functions: Iterable[Function]) -> frozenset[str]:
        """Return the functions that are seen, by name."""
        return frozenset(one.name for one in functions if self._sees(one))

    def _sees(self, function: Function) -> bool:
        if self.everything:
            return True
        owned = function.access.owner == self.tenant
        return owned and (not self.only or function.name in self.only)


def scope_of(key: ApiKey) -> WatchScope:
    """Return what the key may see."""
    if may(key, Right.READ_CLUSTER) and may(key, Right.ALL_TENANTS):
        return WatchScope(everything=True)
    return WatchScope(tenant=key.tenant, only=frozenset(key.functions))
