"""Casts between processes over a real RDMA device: a relay is killed, a block is damaged."""

from collections.abc import Iterator

import pytest

from tests.fixtures.verbs import why_no_rdma
from tests.rdma.cast_nodes import BLOCK_BYTES, BLOCKS, NBYTES, Ended, Node, spec_of, start

NO_RDMA = why_no_rdma()
pytestmark = pytest.mark.skipif(bool(NO_RDMA), reason=f"make test-rdma: {NO_RDMA}")
HALF = BLOCKS // 2


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Four, of which the first holds the image and damages two of its blocks, once each."""
    bad = {3 * BLOCK_BYTES + 5, (HALF + 3) * BLOCK_BYTES}
    running = [start("n0", holds=True, bad=bad)]
    try:
        running += [start(f"n{index}", holds=False) for index in range(1, 4)]
        yield running
    finally:
        for node in running:
            node.kill()


def test_a_killed_relay_is_gone_round_and_damaged_blocks_are_healed(nodes: list[Node]) -> None:
    source, relay, *others = nodes
    spec = spec_of(nodes, "chain")
    for node in nodes[1:]:
        node.pipe.send(spec)
    source.pipe.send(HALF * BLOCK_BYTES)  # no more of it is here, so that nobody is done before the kill
    for node in others:
        node.hear_until(lambda said: said == HALF)
    relay.kill()
    source.pipe.send(NBYTES)
    ended = [node.hear_until(lambda said: isinstance(said, Ended)) for node in others]
    found = [one for one in ended if isinstance(one, Ended)]
    assert all(one.right and one.by_transport == {"verbs": NBYTES} for one in found)
    assert "n1" in found[0].lost  # the next of the chain may not have had to ask the dead one
    # The first damaged block hit the relay, the second the node which read it from the source.
    assert sum(one.damaged for one in found) == 1
    assert sum(one.by_peer.get("n0", 0) for one in found) >= NBYTES - HALF * BLOCK_BYTES


def test_all_targets_of_a_binomial_cast_read_over_verbs_and_heal(nodes: list[Node]) -> None:
    spec = spec_of(nodes, "binomial")
    for node in nodes[1:]:
        node.pipe.send(spec)
    nodes[0].pipe.send(NBYTES)
    ended = [node.hear_until(lambda said: isinstance(said, Ended)) for node in nodes[1:]]
    found = [one for one in ended if isinstance(one, Ended)]
    assert all(one.right and one.by_transport == {"verbs": NBYTES} and not one.lost for one in found)
    assert sum(one.damaged for one in found) == 2
