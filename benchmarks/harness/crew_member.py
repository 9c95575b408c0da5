"""The child's end of a crew: carries out orders until the benchmark closes the connection."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol, MemberHello, OrderFailed, encode

_LINE_BYTES = 16 << 20


def serve(
    path: str, hello: MemberHello, protocol: CrewProtocol, carry_out: Callable[[Any], CrewMessage]
) -> None:
    """Carry out orders, blocking; an exception is reported, and then raised."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(path)
        connected.sendall(encode(hello) + b"\n")
        with connected.makefile("rb") as lines:
            for line in lines:
                try:
                    reply = carry_out(protocol.decode_order(line))
                except Exception as error:
                    connected.sendall(encode(OrderFailed(reason=repr(error))) + b"\n")
                    raise
                connected.sendall(encode(reply) + b"\n")


async def serve_async(
    path: str | Path,
    hello: MemberHello,
    protocol: CrewProtocol,
    carry_out: Callable[[Any], Awaitable[CrewMessage]] | None = None,
) -> None:
    """Carry out orders on the event loop; an exception is reported, and then raised."""
    reader, writer = await asyncio.open_unix_connection(path, limit=_LINE_BYTES)
    try:
        writer.write(encode(hello) + b"\n")
        while line := await reader.readline():
            try:
                assert carry_out is not None, "this child takes no orders"
                reply = await carry_out(protocol.decode_order(line))
            except Exception as error:
                writer.write(encode(OrderFailed(reason=repr(error))) + b"\n")
                await writer.drain()
                raise
            writer.write(encode(reply) + b"\n")
            await writer.drain()
    finally:
        writer.close()
