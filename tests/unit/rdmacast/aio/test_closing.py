"""Ends of TLS connections."""

import asyncio
from pathlib import Path
from typing import Any

from rdmacast.aio.closing import abort_when_received
from rdmacast.protocol.tls import TlsFiles, load_client, load_https
from tests.fixtures.loops import on_both_loops
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.tls import issue

_LINGER_S = 0.1


@on_both_loops
async def test_a_connection_that_is_closed_when_its_time_comes_is_left_alone(tmp_path: Path) -> None:
    loop, files, failed = asyncio.get_running_loop(), issue(tmp_path), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: failed.append(context))
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.close()
        abort_when_received(writer.transport, linger_s=_LINGER_S)
        loop.call_later(2 * _LINGER_S, done.set)

    tls = load_https(TlsFiles(cert=files.cert, key=files.key))
    async with (
        asyncio.timeout(PATIENCE_S),
        await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server,
    ):
        address = server.sockets[0].getsockname()
        client = load_client(TlsFiles(ca=files.ca))
        reader, writer = await asyncio.open_connection(*address, ssl=client)
        writer.write(b"x")
        assert await reader.read() == b""
        writer.close()
        await done.wait()
    assert not failed
