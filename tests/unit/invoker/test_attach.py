"""The node's socket for engines: several nodes of a machine, also killed ones."""

import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from invoker.loading.arrival import ImageArrival
from invoker.loading.attach import AttachServer, socket_path
from registry.images.manifest import Manifest

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
