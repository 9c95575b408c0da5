"""HTTPS: a whole platform within TLS, and handshakes that never end."""

import socket
from itertools import chain
from pathlib import Path

import httpx2
import pytest

from rdmacast.protocol.tls import TlsFiles, load_client
from tests.fixtures.platform import Platform
from tests.fixtures.tls import issue


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
        trusted = load_client(TlsFiles(ca=files.ca))
        trusted._current().check_hostname = False  # type: ignore[attr-defined]
        assert httpx2.get(f"{platform.url}/readyz", verify=trusted, trust_env=False).status_code == 200
    finally:
        platform.down()
