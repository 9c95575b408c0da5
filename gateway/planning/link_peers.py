"""Which links nodes open to each other when they join, so that casts need not connect first. Pure."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gateway.planning.actions import PrepareLinksAction
from registry.messages.images import MAX_LINK_PEERS, LinkPeer
from registry.records.node import NodeRecord

_Pair = tuple[int, LinkPeer, int]  # a peer, with the epochs of the node and of the peer


def link_peers(nodes: Sequence[NodeRecord]) -> Mapping[str, tuple[LinkPeer, ...]]:
    """Return the peers of each node: one node of each other host, first those under its leaf switch.

    Of more than MAX_LINK_PEERS a node gets those that follow it on a ring of hashes, so that a node which
    joins or leaves changes the peers of few others.
    """
    first: dict[str, NodeRecord] = {}
    for node in sorted(nodes, key=lambda one: one.id):
        first.setdefault(node.host, node)
    ring = sorted(first.values(), key=lambda one: hashlib.blake2b(one.host.encode(), digest_size=8).digest())
    leaves: defaultdict[str, list[NodeRecord]] = defaultdict(list)
    for one in ring:
        leaves[one.leaf].append(one)
    place = {one.host: index for index, one in enumerate(ring)}
    place_in_leaf = {one.host: index for group in leaves.values() for index, one in enumerate(group)}
    found = {}
    for host, one in first.items():
        near = _followers(leaves[one.leaf], place_in_leaf[host])
        chosen = {peer.id: peer for peer in (*near, *_followers(ring, place[host]))}
        peers = [LinkPeer(cast=peer.cast, host=peer.host) for peer in chosen.values()]
        found[host] = tuple(peers[:MAX_LINK_PEERS])
    return {node.id: found[node.host] for node in nodes}


def _followers(ring: Sequence[NodeRecord], place: int) -> list[NodeRecord]:
    """Return the nodes after a place on the ring, at most MAX_LINK_PEERS."""
    count = min(len(ring) - 1, MAX_LINK_PEERS)
    return [ring[(place + step) % len(ring)] for step in range(1, count + 1)]


class LinkPlanner:
    """A planner of the links that nodes prepare: a node receives the peers that are new to it.

    Peers that were restarted are new. Nodes close links that no cast uses; later casts connect themselves.
    """

    def __init__(self) -> None:
        self._sent: dict[str, frozenset[_Pair]] = {}  # by node
        self._nodes: frozenset[tuple[str, int, str, str]] = frozenset()

    def __repr__(self) -> str:
        return f"<LinkPlanner of {len(self._sent)} nodes>"

    def reset(self) -> None:
        """Forget what was sent, as another controller may follow."""
        self._sent.clear()
        self._nodes = frozenset()

    def plan(self, nodes: Sequence[NodeRecord]) -> list[PrepareLinksAction]:
        """Return an action for each node that has new peers."""
        known = frozenset((node.id, node.epoch, node.cast, node.leaf) for node in nodes)
        if known == self._nodes:
            return []
        self._nodes = known
        found, before, actions = link_peers(nodes), self._sent, []
        epochs = {node.cast: node.epoch for node in nodes}
        self._sent = {}
        for node in nodes:
            pairs = {peer: (node.epoch, peer, epochs[peer.cast]) for peer in found[node.id]}
            self._sent[node.id] = frozenset(pairs.values())
            had = before.get(node.id, frozenset())
            new = tuple(peer for peer, pair in pairs.items() if pair not in had)
            if new:
                actions.append(PrepareLinksAction(node=node.id, peers=new))
        return actions
