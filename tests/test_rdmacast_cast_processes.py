"""Casts between processes, of which one is killed."""

import hashlib
import random

import pytest

from tests.cast_process import BLOCK_BYTES, NodeProcess, spec_of

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
