"""Casts between processes, of which one is killed."""

import hashlib
import random

import pytest

from tests.cast_process import BLOCK_BYTES, RATE_BYTES_S, NodeProcess, spec_of

CONTENT = random.Random(9).randbytes(40 * BLOCK_BYTES + 77)


@pytest.mark.parametrize("planner", ["binomial", "chain"])
@pytest.mark.parametrize("victim", [0, 2, 4], ids=["source", "relay", "target"])
def test_after_kill_9_all_others_complete(victim: int, planner: str) -> None:
    nodes = [NodeProcess(f"n{index}", CONTENT, holds=index < 2) for index in range(6)]
    try:
        spec = spec_of(nodes, 2, len(CONTENT), planner)
        for node in nodes:
            node.begin(spec)
        nodes[5].holds(5)
        nodes[victim].kill()
        for node in nodes[2:]:
            if node is not nodes[victim]:
                digest, lost = node.hears("done")
                assert digest == hashlib.sha256(CONTENT).hexdigest()
                assert set(lost) <= {nodes[victim].name}
    finally:
        codes = [node.stop() for node in nodes]
    assert [code for code in codes if code] == [-9]


def test_a_node_that_gives_slowly_is_planned_around() -> None:
    content = random.Random(10).randbytes(120 * BLOCK_BYTES)
    nodes = [
        NodeProcess(
            f"n{index}", content, holds=index == 0, rate_bytes_s=RATE_BYTES_S / (6 if index == 3 else 1)
        )
        for index in range(6)
    ]
    try:
        spec = spec_of(nodes, 1, len(content), "chain")
        for node in nodes:
            node.begin(spec)
        for node in nodes[1:]:
            # Of the nodes before it some may be done before they are told.
            assert "n3" in node.hears("slow") or node.name in ("n1", "n2")
            assert node.hears("done")[0] == hashlib.sha256(content).hexdigest()
    finally:
        codes = [node.stop() for node in nodes]
    assert codes == [0] * 6
