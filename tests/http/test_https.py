"""HTTPS: a whole platform within TLS, and handshakes that never end."""

import asyncio
import socket
import time
from itertools import chain
from pathlib import Path

import httpx2
import pytest

from gateway.core.settings import RequestLimits
from rdmacast.aio.closing import LINGER_S
from rdmacast.protocol.tls import TlsFiles, load_client
from registry.config.tls import TlsSettings
from tests.fixtures.gateway_http import gateway
from tests.fixtures.loops import on_both_loops
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.platform import Platform
from tests.fixtures.tls import issue, seconds_until_hung_up_on


def test_a_platform_serves_https_and_channels_within_tls(tmp_path: Path, root: Path) -> None:
    files = issue(tmp_path)
    flags = [f"--{prefix}tls-{one}" for prefix in ("", "channel-", "cast-") for one in ("cert", "key", "ca")]
    named = {"cert": files.cert, "key": files.key, "ca": files.ca}
    given = [(flag, str(named[flag.rpartition("-")[2]])) for flag in flags if flag != "--tls-ca"]
    platform = Platform(data=tmp_path / "data", flags=("--nodes", "2", *chain(*given)))
    platform.up()
    try:
        assert platform.url.startswith("https://")
        port = int(platform.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"HTTP/1.1" not in plain.recv(100)
        with pytest.raises(httpx2.ConnectError, match=r"(?i)certificate"):
            httpx2.get(f"{platform.url}/livez", trust_env=False)
        platform.env["HYPERCAST_CA_FILE"] = str(files.ca)
        platform.run("deploy", str(root / "functions" / "tiny-coder"), "--name", "coder")
        streamed = platform.run("invoke", "coder", "-p", "def add(a, b):", "-n", "24", "-t", "0", "--stream")
        assert streamed.stdout.count("\n") > 1
        del platform.env["HYPERCAST_CA_FILE"]
        refused = platform.run("list", check=False)
        assert refused.returncode and "--ca" in refused.stderr
    finally:
        platform.down()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["silent", "half a handshake"])
async def test_handshakes_that_never_end_are_bounded_and_end(tmp_path: Path, sent: bytes) -> None:
    files = issue(tmp_path)
    tls = TlsSettings(http=TlsFiles(cert=files.cert, key=files.key))
    async with gateway(tls=tls, max_connections=10, limits=RequestLimits(first_byte_s=2.0)) as gw:
        port = gw.server.port
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for _, writer in held:
            writer.write(sent)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert not await ended(reader)  # one address leaves room for others
        writer.close()
        async with asyncio.timeout(PATIENCE_S):
            for reader, _ in held:
                assert not await ended(reader)
        for _, writer in held:
            writer.close()
        url = f"https://127.0.0.1:{port}/livez"
        async with httpx2.AsyncClient(verify=load_client(TlsFiles(ca=files.ca)), trust_env=False) as http:
            assert (await http.get(url)).status_code == 200


@on_both_loops
@pytest.mark.parametrize(
    "sent",
    [b"", b"no request\r\n\r\n", b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"],
    ids=["silent", "refused", "answered"],
)
async def test_a_peer_that_never_ends_tls_soon_leaves_its_slot(tmp_path: Path, sent: bytes) -> None:
    files = issue(tmp_path)
    tls = TlsSettings(http=TlsFiles(cert=files.cert, key=files.key))
    async with gateway(tls=tls, max_connections=1, limits=RequestLimits(first_byte_s=0.2)) as gw:
        client = load_client(TlsFiles(ca=files.ca))
        assert await asyncio.to_thread(seconds_until_hung_up_on, gw.server.port, client, sent) < 15
        async with httpx2.AsyncClient(verify=client, trust_env=False) as http:
            assert (await http.get(f"https://127.0.0.1:{gw.server.port}/livez")).status_code == 200


@on_both_loops
async def test_a_slow_reader_gets_all_of_the_response_before_which_tls_ends(tmp_path: Path) -> None:
    files = issue(tmp_path)
    tls = TlsSettings(http=TlsFiles(cert=files.cert, key=files.key))
    client = load_client(TlsFiles(ca=files.ca))

    def read_late(port: int) -> bytes:
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.settimeout(PATIENCE_S)
            plain.connect(("127.0.0.1", port))
            with client.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                secure.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                time.sleep(1.5 * LINGER_S)  # the point: later than a silent peer's connection would end
                return b"".join(iter(lambda: secure.recv(1 << 16), b""))

    async with gateway(tls=tls) as gw:
        head, _, body = (await asyncio.to_thread(read_late, gw.server.port)).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}\r\n".encode() in head + b"\r\n" and len(body) > 1 << 15


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what came until the other side closed the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
