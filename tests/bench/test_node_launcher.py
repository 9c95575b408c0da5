"""What the launcher changes about a node's sources."""

from pathlib import Path

from benchmarks.harness.node_launcher import StartNode, sources_of
from invoker.loading.loader import LoadSources

SOURCES = LoadSources(node="n0", host="h0", store=None, casts=None, device_buffer=lambda image: None)


def test_a_node_with_its_own_disk_takes_part_in_no_cast(tmp_path: Path) -> None:
    order = StartNode(argv=[], log="", store=str(tmp_path), disk_bytes_s=5e6)
    found = sources_of(order, SOURCES)
    assert found.casts is None and found.store is not None and found.store.label == "disk"
    assert sources_of(StartNode(argv=[], log=""), SOURCES) is SOURCES
