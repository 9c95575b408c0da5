"""The shared state and what follows it, as one dependency."""

from dataclasses import dataclass

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.state_cache import ClusterStateCache
from gateway.cluster.sync import ClusterStateSync
from registry.clock import Clock
from registry.state import ClusterState


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext:
    """The shared state and its cache: `changes` is notified after each change that `sync` applies."""

    state: ClusterState
    state_cache: ClusterStateCache
    sync: ClusterStateSync
    changes: ChangeCondition
    clock: Clock
