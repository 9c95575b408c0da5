"""Casts between processes, of which one is killed, gives up or is slow."""

import hashlib
import random

import pytest

from tests.fixtures.cast_process import BLOCK_BYTES, RATE_BYTES_S, NodeProcess, spec_of

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
                digest, lost = node.receive("done")
                assert digest == hashlib.sha256(CONTENT).hexdigest()
                assert set(lost) <= {nodes[victim].name}
    finally:
        codes = [node.stop() for node in nodes]
    assert [code for code in codes if code] == [-9]


def test_after_kill_9_of_the_only_source_all_name_the_blocks_that_nobody_holds() -> None:
    nodes = [NodeProcess(f"n{index}", CONTENT, holds=index == 0) for index in range(4)]
    try:
        spec = spec_of(nodes, 1, len(CONTENT), "chain")
        for node in nodes:
            node.begin(spec)
        nodes[1].holds(3)
        nodes[0].kill()
        reported = [node.receive("lost") for node in nodes[1:]]
        somewhere = 0
        for _, held in reported:
            somewhere |= held
        nobodys = tuple(block for block in range(spec.blocks) if not somewhere >> block & 1)
        assert nobodys and {blocks for blocks, _ in reported} == {nobodys}
    finally:
        codes = [node.stop() for node in nodes]
    assert codes == [-9, 0, 0, 0]


def test_one_that_gives_up_frees_all_but_what_it_has_and_holds_up_nobody() -> None:
    nodes = [NodeProcess(f"n{index}", CONTENT, holds=index == 0) for index in range(4)]
    try:
        spec = spec_of(nodes, 1, len(CONTENT), "chain")
        for node in nodes:
            node.begin(spec)
        nodes[2].holds(5)
        assert 5 <= nodes[2].cancel() < spec.blocks
        for node in (nodes[1], nodes[3]):
            assert node.receive("done")[0] == hashlib.sha256(CONTENT).hexdigest()
        for node in (nodes[0], nodes[1], nodes[3]):
            assert node.stop() == 0
        assert nodes[2].more() == (0, 0)
    finally:
        codes = [node.stop() for node in nodes]
    assert codes == [0] * 4


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
            # Of the nodes before it some may be done before the verdict arrives.
            assert "n3" in node.receive("slow") or node.name in ("n1", "n2")
            assert node.receive("done")[0] == hashlib.sha256(content).hexdigest()
    finally:
        codes = [node.stop() for node in nodes]
    assert codes == [0] * 6
