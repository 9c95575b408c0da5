"""What a node does with its flags for RDMA, NIXL and TLS, on a machine that may have none."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from invoker.base.errors import SettingsError
from invoker.loading.transports import (
    CastTransports,
    export_arena,
    make_connector,
    open_nixl_node,
    open_rdma,
)
from invoker.settings import Settings, parse_settings
from rdmacast.errors import NoTransport
from rdmacast.fakes.cuda_ipc import MemoryIpcDriver, MemoryMachine
from rdmacast.fakes.nixl import MemoryNixl
from rdmacast.fakes.verbs import MemoryDevice, MemoryFabric
from rdmacast.protocol.tls import NodeTls
from rdmacast.transport import PeerAddress
from rdmacast.transports.nixl.node import NixlNode
from rdmacast.transports.verbs.node import VerbsNode
from registry.config.tls import open_tls
from registry.errors import InvalidRecord
from tests.fixtures.nixl import why_no_nixl
from tests.fixtures.tls import issue
from tests.fixtures.verbs import why_no_rdma

PEER = PeerAddress(url="tcp://10.0.0.7:41000", host="b")


def settings(*flags: str) -> Settings:
    least = ["--redis-url", "unix:///tmp/r.sock", "--host-id", "a"]
    return parse_settings([*least, *flags], {"HYPERCAST_CLUSTER_SECRET": "x" * 32})


def ends(
    verbs: VerbsNode | str = "none",
    nixl: NixlNode | str = "",
    gpu: MemoryIpcDriver | str = "this node has no GPU",
) -> CastTransports:
    return CastTransports(tls=NodeTls(), verbs=verbs, nixl=nixl, gpu=gpu, cuda_ipc=None)


def test_tcp_is_taken_where_there_is_no_rdma_and_the_reason_is_told(tmp_path: Path) -> None:
    for flags, why in (
        (["--rdma", "off"], "--rdma off"),
        (["--link-rate", "1mbit"], "--link-rate caps TCP only"),
    ):
        reported = settings(*flags)
        verbs = open_rdma(reported, AsyncExitStack())
        choice = make_connector(reported, tmp_path, ends(verbs)).choose(PEER)
        assert (choice.transport, choice.reason) == ("tcp", f"host 'b' is not 'a'; no verbs: {why}")


def test_rdma_is_taken_where_it_is_and_nothing_else_where_it_is_required(tmp_path: Path) -> None:
    with VerbsNode(MemoryDevice(MemoryFabric()), "here") as verbs:
        for flags in ([], ["--require-rdma"]):
            connector = make_connector(settings(*flags), tmp_path, ends(verbs))
            assert connector.choose(PEER).transport == "verbs"
            assert connector.choose(PeerAddress(url=PEER.url, host="a")).transport == "shm"
        with pytest.raises(NoTransport, match="no verbs: the peer has none; no tcp: --require-rdma"):
            connector.choose(PEER, {"verbs": "the peer has none"})


@pytest.mark.skipif(not why_no_rdma(), reason="there is RDMA here")
def test_a_node_that_needs_rdma_does_not_start_without() -> None:
    assert open_rdma(settings(), AsyncExitStack()) == why_no_rdma()
    for flags in (["--require-rdma"], ["--rdma", "mlx5_9"]):
        with pytest.raises(SettingsError, match="no RDMA: "):
            open_rdma(settings(*flags), AsyncExitStack())


def test_nixl_is_taken_where_it_was_asked_for_and_rdma_is_not_to_be_had(tmp_path: Path) -> None:
    assert open_nixl_node(settings(), AsyncExitStack()) == ""
    with NixlNode(MemoryNixl()) as nixl:
        choice = make_connector(settings("--nixl"), tmp_path, ends(nixl=nixl)).choose(PEER)
        assert (choice.transport, choice.reason) == ("nixl", "host 'b' is not 'a'; no verbs: none")
        with VerbsNode(MemoryDevice(MemoryFabric()), "here") as verbs:
            connector = make_connector(settings("--nixl"), tmp_path, ends(verbs, nixl))
            assert connector.choose(PEER).transport == "verbs"


@pytest.mark.skipif(not why_no_nixl(), reason="there is NIXL here")
def test_a_node_that_needs_nixl_does_not_start_without() -> None:
    with pytest.raises(SettingsError, match="--nixl: nixl cannot be imported"):
        open_nixl_node(settings("--nixl"), AsyncExitStack())


def test_a_gpu_of_the_same_host_is_read_where_there_is_no_file(tmp_path: Path) -> None:
    near = PeerAddress(url=PEER.url, host="a")
    driver = MemoryIpcDriver(MemoryMachine())
    connector = make_connector(settings(), tmp_path, ends(gpu=driver))
    choice = connector.choose(near, {"shm": "it cannot serve this region"})
    assert choice.transport == "cuda_ipc"
    assert choice.reason == "same host 'a'; no shared memory: it cannot serve this region"
    assert connector.choose(PEER).transport == "tcp"
    choice = make_connector(settings(), tmp_path, ends()).choose(near, {"shm": "no file"})
    assert (choice.transport, "no cuda_ipc: this node has no GPU" in choice.reason) == ("tcp", True)


def test_an_arena_that_cannot_be_lent_is_told_and_not_lent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert export_arena(MemoryIpcDriver(MemoryMachine()), 4096, 4096, AsyncExitStack()) is None
    assert "no allocation of this process begins there" in caplog.text


def test_tls_for_casts_needs_three_files_that_are_what_they_should_be(tmp_path: Path) -> None:
    files = issue(tmp_path)
    flags = ["--cast-tls-cert", str(files.cert), "--cast-tls-key", str(files.key)]
    with pytest.raises(SettingsError, match="given together"):
        settings(*flags)
    assert open_tls(settings().tls.cast, "casts") == NodeTls()
    assert open_tls(settings(*flags, "--cast-tls-ca", str(files.ca)).tls.cast, "casts").server is not None
    for wrong, why in ((tmp_path / "none", "No such file"), (files.key, "")):
        with pytest.raises(InvalidRecord, match=f"TLS for casts by .*{why}"):
            open_tls(settings(*flags, "--cast-tls-ca", str(wrong)).tls.cast, "casts")
