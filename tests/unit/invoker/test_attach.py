"""The node's socket for engines: several nodes of a machine, also killed ones."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from invoker.base.accepting import accepted
from invoker.loading.arrival import ImageArrival
from invoker.loading.attach import AttachServer, socket_path
from rdmacast.aio.groups import PartCancelled
from rdmacast.errors import CastError
from registry.images.manifest import Manifest
from tests.fixtures.patience import until

pytestmark = pytest.mark.anyio


def _no_image(asked: dict[str, str]) -> AbstractAsyncContextManager[tuple[Manifest, ImageArrival]]:
    raise AssertionError(asked)


def _killed(path: Path) -> None:
    """Leave the socket of a process that no longer listens."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


async def test_the_last_node_removes_the_folder_with_sockets_of_killed_ones(tmp_path: Path) -> None:
    first, second, dead = (socket_path(tmp_path, node) for node in ("first", "second", "dead"))
    async with AttachServer(first, _no_image).listening():
        async with AttachServer(second, _no_image).listening():
            _killed(dead)
            assert second.stat().st_mode & 0o777 == 0o600
        assert sorted(first.parent.iterdir()) == [first]
    assert not first.parent.exists()


async def test_a_node_takes_over_its_earlier_socket(tmp_path: Path) -> None:
    path = socket_path(tmp_path, "node")
    path.parent.mkdir()
    _killed(path)
    async with AttachServer(path, _no_image).listening():
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(str(path))
    assert not path.parent.exists()


@pytest.mark.parametrize("failure", [OSError("no space"), CastError("no space"), PartCancelled("no space")])
async def test_a_load_that_fails_is_an_error_of_the_engine(tmp_path: Path, failure: Exception) -> None:
    @asynccontextmanager
    async def fail(asked: dict[str, str]) -> AsyncIterator[tuple[Manifest, ImageArrival]]:
        raise failure
        yield

    path = socket_path(tmp_path, "node")
    async with AttachServer(path, fail).listening():
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"model":"f"}\n')
        assert json.loads(await reader.read()) == {"error": "no space"}
        writer.close()


async def test_connections_are_accepted_after_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("invoker.attach")
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as engine:
        listening.setblocking(False)
        listening.bind(str(tmp_path / "socket"))  # and does not listen: an accept fails
        async with aclosing(accepted(listening, log)) as connections:
            first = asyncio.ensure_future(anext(connections))
            await until(lambda: "cannot accept" in caplog.text)
            listening.listen()
            engine.connect(str(tmp_path / "socket"))
            (await first).close()
