"""The directions in which serving uses the links of nodes, from roles and pipelines. Pure.

Links carry both directions at once: a node that receives K and V can send weights without slowing them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from gateway.cluster.state_cache import ClusterStateCache
from registry.records.live import InstanceRole, LiveRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTraffic:
    """The nodes that send or receive K and V, or hidden states, for what they serve."""

    senders: frozenset[str] = frozenset()
    receivers: frozenset[str] = frozenset()

    def involves(self, node: str) -> bool:
        """Return whether serving uses the node's link in either direction."""
        return node in self.senders or node in self.receivers


NO_TRAFFIC = ServingTraffic()


def serving_traffic(state_cache: ClusterStateCache) -> ServingTraffic:
    """Return the traffic of all functions: of instances with roles, and of pipelines."""
    senders, receivers = set[str](), set[str]()
    for record in state_cache.live:
        for node, role in _roles(record, state_cache):
            (senders if role is InstanceRole.PREFILL else receivers).add(node)
        for pipeline in record.pipelines:
            for stage, following in pairwise(pipeline.stages):
                senders.add(stage.node)
                receivers.add(following.node)
    return ServingTraffic(senders=frozenset(senders), receivers=frozenset(receivers))


def _roles(record: LiveRecord, state_cache: ClusterStateCache) -> Iterable[tuple[str, InstanceRole]]:
    """Return the nodes of instances with a role that still exist."""
    for id_, role in record.roles.items():
        instance = state_cache.instance(id_)
        if instance is not None:
            yield instance.node, role
