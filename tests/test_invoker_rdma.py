"""What a node does with its flags for RDMA, on a machine that may have none."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from invoker.assembly import _make_connector, _open_rdma
from invoker.errors import SettingsError
from invoker.settings import Settings, parse_settings
from rdmacast.errors import NoTransport
from rdmacast.memory_verbs import MemoryDevice, MemoryFabric
from rdmacast.transport import PeerAddress
from rdmacast.verbs_node import VerbsNode
from tests.verbs_fixture import why_no_rdma

PEER = PeerAddress(url="tcp://10.0.0.7:41000", host="b")


def settings(*flags: str) -> Settings:
    least = ["--redis-url", "unix:///tmp/r.sock", "--host-id", "a"]
    return parse_settings([*least, *flags], {"HYPERCAST_CLUSTER_SECRET": "x" * 32})


def test_tcp_is_taken_where_there_is_no_rdma_and_the_reason_is_told(tmp_path: Path) -> None:
    for flags, why in (
        (["--rdma", "off"], "--rdma off"),
        (["--link-rate", "1mbit"], "--link-rate caps TCP only"),
    ):
        told = settings(*flags)
        verbs = _open_rdma(told, AsyncExitStack())
        choice = _make_connector(told, tmp_path, verbs).choose(PEER)
        assert (choice.transport, choice.reason) == ("tcp", f"host 'b' is not 'a'; no verbs: {why}")


def test_rdma_is_taken_where_it_is_and_nothing_else_where_it_is_required(tmp_path: Path) -> None:
    with VerbsNode(MemoryDevice(MemoryFabric()), "here") as verbs:
        for flags in ([], ["--require-rdma"]):
            connector = _make_connector(settings(*flags), tmp_path, verbs)
            assert connector.choose(PEER).transport == "verbs"
            assert connector.choose(PeerAddress(url=PEER.url, host="a")).transport == "shm"
        with pytest.raises(NoTransport, match="no verbs: the peer has none; no tcp: --require-rdma"):
            connector.choose(PEER, {"verbs": "the peer has none"})


@pytest.mark.skipif(not why_no_rdma(), reason="there is RDMA here")
def test_a_node_that_needs_rdma_does_not_start_without() -> None:
    assert _open_rdma(settings(), AsyncExitStack()) == why_no_rdma()
    for flags in (["--require-rdma"], ["--rdma", "mlx5_9"]):
        with pytest.raises(SettingsError, match="no RDMA: "):
            _open_rdma(settings(*flags), AsyncExitStack())
