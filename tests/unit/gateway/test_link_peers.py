"""Which nodes keep links to which."""

import time

from gateway.planning.link_peers import LinkPlanner, link_peers
from registry.messages.images import MAX_LINK_PEERS
from registry.records.node import NodeRecord
from tests.fixtures.control import make_node


def nodes(count: int, leaves: int = 1, a_host: int = 1) -> list[NodeRecord]:
    return [
        make_node(f"n{number:04}", host=f"h{number // a_host}", leaf=f"l{number % leaves}", cast=f"c{number}")
        for number in range(count)
    ]


def test_few_nodes_are_all_linked_and_hosts_once() -> None:
    found = link_peers(nodes(16))
    assert all(
        {peer.host for peer in found[f"n{n:04}"]} == {f"h{m}" for m in range(16)} - {f"h{n}"}
        for n in range(16)
    )
    shared = link_peers(nodes(6, a_host=2))
    assert shared["n0000"] == shared["n0001"]
    assert sorted(peer.cast for peer in shared["n0000"]) == ["c2", "c4"]
    assert link_peers(nodes(1)) == {"n0000": ()}


def test_of_many_those_under_the_same_leaf_come_first() -> None:
    many = nodes(200, leaves=4)
    leaf_of = {node.host: node.leaf for node in many}
    found = link_peers(many)
    for node in (many[0], many[77]):
        peers = found[node.id]
        assert len(peers) == MAX_LINK_PEERS and {leaf_of[peer.host] for peer in peers} == {node.leaf}


def test_a_node_that_joins_changes_the_peers_of_few() -> None:
    before, after = link_peers(nodes(500)), link_peers(nodes(501))
    changed = [id_ for id_ in before if before[id_] != after[id_]]
    assert 0 < len(changed) <= MAX_LINK_PEERS


def test_nodes_receive_what_is_new_to_them() -> None:
    planner = LinkPlanner()
    assert planner.plan(nodes(1)) == []
    sent = {action.node: {peer.host for peer in action.peers} for action in planner.plan(nodes(3))}
    assert sent == {"n0000": {"h1", "h2"}, "n0001": {"h0", "h2"}, "n0002": {"h0", "h1"}}
    assert planner.plan(nodes(3)) == []
    sent = {action.node: {peer.host for peer in action.peers} for action in planner.plan(nodes(4))}
    assert sent == {f"n{n:04}": {"h3"} for n in range(3)} | {"n0003": {"h0", "h1", "h2"}}
    assert planner.plan(nodes(3)) == []  # one left
    again = make_node("n0001", host="h1", leaf="l0", cast="c9", epoch=2)
    sent = {action.node: {peer.cast for peer in action.peers} for action in planner.plan([*nodes(1), again])}
    assert sent == {"n0000": {"c9"}, "n0001": {"c0"}}
    same_port = make_node("n0001", host="h1", leaf="l0", cast="c9", epoch=3)
    assert len(planner.plan([*nodes(1), same_port])) == 2
    again = same_port
    planner.reset()
    assert len(planner.plan([*nodes(1), again])) == 2


def test_a_thousand_nodes_take_little_time() -> None:
    many, planner = nodes(1000, leaves=20), LinkPlanner()
    taken_s = []
    for count in (998, 999, 1000):
        began_s = time.process_time()
        planner.plan(many[:count])
        taken_s.append(time.process_time() - began_s)
    assert min(taken_s) < 0.25
