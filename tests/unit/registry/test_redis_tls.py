"""Redis behind TLS: a relay ends it, since the bundled redis-server has none."""

import asyncio
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from rdmacast.protocol.tls import TlsFiles, load_tls
from registry.errors import InvalidRecord, StateUnavailable
from registry.redis.state import RedisState
from tests.fixtures.plain_redis import PlainRedis
from tests.fixtures.tls import issue


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


async def _relay(port: int, tls: ssl.SSLContext | None) -> asyncio.Server:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    return await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=tls)


def _named(folder: Path) -> TlsFiles:
    """Return files whose certificate is valid for localhost."""
    files = issue(folder, "redis")
    extension = folder / "san"
    extension.write_text("subjectAltName=DNS:localhost")
    signed = ["-CA", files.ca, "-CAkey", folder / "redis-ca.key", "-extfile", extension, "-out", files.cert]
    command = ["openssl", "x509", "-req", "-in", folder / "redis.csr", *signed]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return files


async def test_redis_within_mutual_tls_and_who_is_refused(tmp_path: Path) -> None:
    files = _named(tmp_path)
    (tmp_path / "other").mkdir()
    other = issue(tmp_path / "other")
    with PlainRedis(tmp_path / "redis") as redis:
        server = await _relay(redis.port, load_tls(files).server)
        port = server.sockets[0].getsockname()[1]
        url = f"rediss://localhost:{port}/0"
        async with RedisState.connect(url, tls=files) as state:
            await state.ping()
        refused = [
            (url, TlsFiles(ca=files.ca)),
            (url, TlsFiles(ca=other.ca, cert=files.cert, key=files.key)),
            (url, None),
            (f"rediss://127.0.0.1:{port}/0", files),
            (f"redis://localhost:{port}/0", None),
        ]
        for address, tls in refused:
            async with RedisState.connect(address, tls=tls) as state:
                with pytest.raises(StateUnavailable):
                    await state.ping()
        with pytest.raises(InvalidRecord, match="rediss://"):
            RedisState.connect(f"redis://localhost:{port}/0", tls=files)
        server.close()


@pytest.mark.parametrize("option", ["ssl_ca_certs=/ca.pem", "ssl_certfile=/c.pem", "ssl_cert_reqs=none"])
def test_options_of_tls_in_the_url_are_refused(option: str) -> None:
    with pytest.raises(InvalidRecord, match=f"{option.partition('=')[0]}.* --redis-ca, --redis-cert"):
        RedisState.connect(f"rediss://localhost/0?{option}", tls=TlsFiles())
