"""What the launcher changes about a node's sources."""

from pathlib import Path

import pytest

from benchmarks.harness.node_launcher import StartNode, sources_of
from benchmarks.harness.rival_nodes import GroupWatcher
from invoker.base.counters import Counters
from invoker.loading.cast_fetch import CastContext
from invoker.loading.loader import LoadSources
from rdmacast.cast.links import CastLinks
from rdmacast.fakes.transport import MemoryNetwork, MemoryTransport, MemoryWatcher
from rdmacast.transports.connector import Connector
from registry.clock import FakeClock

NETWORK = MemoryNetwork()
CASTS = CastContext(
    node="n0",
    links=CastLinks(connector=Connector("h0", [MemoryTransport(NETWORK)]), watcher=MemoryWatcher(NETWORK)),
    counters=Counters(),
    clock=FakeClock(),
    publish=lambda progress: None,
)
SOURCES = LoadSources(node="n0", host="h0", store=None, casts=CASTS, arena_reader=lambda image: None)


@pytest.mark.parametrize("takes_casts", [True, False])
def test_a_node_with_its_own_disk_takes_part_in_casts_as_ordered(tmp_path: Path, takes_casts: bool) -> None:
    order = StartNode(
        argv=[], log="", store=str(tmp_path), disk_bytes_s=5e6, takes_casts=takes_casts, group_s=0.2
    )
    found = sources_of(order, SOURCES)
    assert found.store is not None and found.store.label == "disk"
    assert (found.casts is not None) is takes_casts
    if found.casts is not None:
        assert isinstance(found.casts.links.watcher, GroupWatcher)
    assert sources_of(StartNode(argv=[], log=""), SOURCES) is SOURCES
