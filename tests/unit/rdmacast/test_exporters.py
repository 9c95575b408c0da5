"""The exporter seam: a transport needs an exporter of its name, and owns the payloads of its requests."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacast.errors import LinkClosed, NotShared, ProtocolError
from rdmacast.exporter import StatelessExporter
from rdmacast.fakes.exporter import MemoryExporter
from rdmacast.protocol.client_link import open_link
from rdmacast.protocol.wire import MAX_REPLY_PAYLOAD_BYTES, MAX_REQUEST_PAYLOAD_BYTES
from rdmacast.server.exporter_registry import ExporterRegistry
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.settings import LinkSettings
from rdmacast.transports.cuda_ipc.memory import CudaIpcMemory
from rdmacast.transports.nixl.memory import MAX_METADATA_BYTES, NixlMemory, NixlProbe
from rdmacast.transports.shm.location import MAX_PATH_BYTES, FileLocation
from rdmacast.transports.verbs.address import ADDRESS_BYTES, QueuePairAddress, QueuePairReply, RemoteMemory
from tests.fixtures.patience import until
from tests.fixtures.transport import CONTENT, SECRET

DECODERS = (
    CudaIpcMemory.decode,
    FileLocation.decode,
    NixlMemory.decode,
    NixlProbe.decode,
    QueuePairAddress.decode,
    QueuePairReply.decode,
    RemoteMemory.decode,
)


async def test_what_an_exporter_grants_is_held_until_it_is_released_and_its_session_until_the_link_ends() -> (
    None
):
    exporter = MemoryExporter("new")
    async with RegionServer(SECRET, exporters=[exporter]) as server:
        server.publish("image", GrowingRegion(CONTENT, complete=True))
        async with open_link(server.address.url, SECRET, LinkSettings()) as link:
            async with link.connect("new", b"hello") as reply:
                assert reply == b"hello"
            async with link.export("new", "image", 5, 10) as reply:
                assert reply == b"image#1 5+10"
                (session,) = exporter.sessions
                assert session.held == [reply]
            await until(lambda: not session.held)
            assert not session.closed
        await until(lambda: session.closed)


async def test_what_a_node_does_not_export_is_refused_and_the_link_stays() -> None:
    exporter = MemoryExporter("new", refuses=True)
    async with RegionServer(SECRET, exporters=[exporter]) as server:
        server.publish("image", GrowingRegion(CONTENT, complete=True))
        async with open_link(server.address.url, SECRET, LinkSettings()) as link:
            for kind, reason in (("new", "new refuses"), ("old", "does not export memory by old")):
                with pytest.raises(NotShared, match=reason):
                    async with link.export(kind, "image", 0, 1):
                        pass
            with pytest.raises(ProtocolError, match="outside image"):
                async with link.export("new", "image", len(CONTENT), 1):
                    pass
            into = bytearray(10)
            await link.read("image", 0, memoryview(into))
            assert into == CONTENT[:10]


async def test_a_link_that_ends_closes_its_sessions_before_it_returns_any_lease() -> None:
    exporter = MemoryExporter("new")
    async with RegionServer(SECRET, exporters=[exporter]) as server:
        server.publish("image", GrowingRegion(CONTENT, complete=True))
        async with open_link(server.address.url, SECRET, LinkSettings()) as link:
            with pytest.raises(LinkClosed):
                async with link.export("new", "image", 0, 1):
                    (session,) = exporter.sessions
                    await server.aclose()
                    assert session.closed and not session.held
                    await link.read("image", 0, memoryview(bytearray(1)))


def test_two_exporters_cannot_have_one_name() -> None:
    with pytest.raises(ValueError, match="new has an exporter already"):
        ExporterRegistry([MemoryExporter("new"), MemoryExporter("new")])


def test_a_stateless_exporter_has_no_connect_request() -> None:
    with pytest.raises(ProtocolError, match="no connect request"):
        StatelessExporter().connect(b"")


def test_the_largest_payloads_of_each_transport_fit_into_a_frame() -> None:
    assert ADDRESS_BYTES <= MAX_REQUEST_PAYLOAD_BYTES
    largest = NixlProbe(NixlMemory(1, bytes(MAX_METADATA_BYTES)), bytes(16)).encode()
    path = FileLocation(serial=1, nbytes=1, path="/" * MAX_PATH_BYTES).encode()
    assert max(len(largest), len(path)) <= MAX_REPLY_PAYLOAD_BYTES


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__qualname__)
@given(st.data())
def test_any_payload_is_decoded_or_refused(decode: Callable[[bytes], object], data: st.DataObject) -> None:
    payload = data.draw(st.binary(max_size=160))
    try:
        decode(payload)
    except ProtocolError as error:
        assert str(error)
