"""Gives images, complete or arriving, to engines in other processes of the machine.

An engine connects to the node's Unix socket and sends one line, `{"image": SHA256}` or `{"model": NAME}`. The
node answers with lines of JSON: first `{"image", "nbytes"}` with a descriptor of the image's file, opened for
reading; then `{"ready": [START, END]}` for each range whose bytes have arrived and been verified, and last
`{"done": true}`, or `{"error": "..."}`. While the connection is open the image stays in host memory.
"""

import asyncio
import hashlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from pathlib import Path

from invoker.base.accepting import accepted
from invoker.base.errors import InvokerError
from invoker.loading.arrival import HostArrival
from rdmacast.aio.groups import PartCancelled, cancel_and_discard, run_all
from rdmacast.errors import CastError
from registry.errors import RegistryError
from registry.images.manifest import Manifest

FOLDER = ".attach"  # under the cluster's folder in shared memory; not a valid host id
MAX_LINE_BYTES = 4096
MAX_ATTACHED = 256
_REQUEST_S = 10.0

log = logging.getLogger("invoker.attach")

# Failures of a load, and requests for what there is not.
_FAILURES = (InvokerError, RegistryError, CastError, PartCancelled, OSError, ValueError)

OpenForEngine = Callable[[dict[str, str]], AbstractAsyncContextManager[tuple[Manifest, HostArrival]]]


class _EngineGone(Exception):
    """The engine has closed its connection, or does not read from it."""


def socket_path(root: Path, node: str) -> Path:
    """Return the path of a node's socket, short enough for any node id."""
    return root / FOLDER / f"{hashlib.sha256(node.encode()).hexdigest()[:16]}.sock"


def ranges_of(manifest: Manifest) -> list[tuple[int, int]]:
    """Return the ranges that are reported: the header, and the layers in order of execution."""
    first = min((tensor.offset for tensor in manifest.tensors), default=manifest.nbytes)
    spans = [(span.start, span.end) for span in manifest.layers if span.start < span.end]
    ranges = [(0, first)] if first else []
    end = first
    for start, stop in sorted(spans):
        if stop > end:
            ranges.append((max(start, end), stop))
            end = stop
    if end < manifest.nbytes:
        ranges.append((end, manifest.nbytes))
    return ranges


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)


def _listens(path: Path) -> bool:
    with _unix_socket() as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


class AttachServer:
    """The node's socket for engines of the same user."""

    def __init__(self, path: Path, open_image: OpenForEngine) -> None:
        self.path = path
        self._open_image = open_image
        self._engines: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<AttachServer {self.path} {len(self._engines)} engines>"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["AttachServer"]:
        """Listen while the block lasts."""
        listener = _unix_socket()
        async with AsyncExitStack() as stack:
            stack.callback(listener.close)
            self._listen(listener)
            stack.callback(self._remove)
            accepting = asyncio.create_task(self._accept(listener), name="attach")
            stack.push_async_callback(lambda: cancel_and_discard(accepting, *self._engines))
            yield self

    def _listen(self, listener: socket.socket) -> None:
        made = self.path.with_suffix(".new")
        while True:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made.unlink(missing_ok=True)
            try:
                listener.bind(str(made))
            except FileNotFoundError:
                continue  # another node has removed the folder between these calls
            made.chmod(0o600)
            listener.listen(16)
            made.replace(self.path)  # under this name it always listens
            return

    def _remove(self) -> None:
        """Remove the socket, those of killed nodes, and then the folder."""
        self.path.unlink(missing_ok=True)
        for path in self.path.parent.glob("*.sock"):
            if not _listens(path):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # other nodes of the machine use it
            self.path.parent.rmdir()

    async def _accept(self, listener: socket.socket) -> None:
        async for engine in accepted(listener, log):
            if len(self._engines) >= MAX_ATTACHED:
                engine.close()
                continue
            task = asyncio.create_task(self._serve(engine), name="attached engine")
            self._engines.add(task)
            task.add_done_callback(self._engines.discard)

    async def _serve(self, engine: socket.socket) -> None:
        with engine:
            engine.setblocking(False)
            try:
                request = await _read_request(engine)
                async with self._open_image(request) as (manifest, arrival):
                    await _send_file(engine, manifest, arrival)
                    await _report(manifest, arrival, lambda line: _send(engine, line))
                    await _closed(engine)
            except _EngineGone as error:
                log.info("an engine is gone: %s", error)
            except _FAILURES as error:
                log.info("an engine was refused: %s", error)
                with suppress(_EngineGone):
                    await _send(engine, {"error": str(error) or type(error).__name__})


@contextmanager
def _talking() -> Iterator[None]:
    """Raise _EngineGone for a failure of the socket: those of the image are OSErrors, too."""
    try:
        yield
    except OSError as error:
        raise _EngineGone(str(error)) from error


async def _read_request(engine: socket.socket) -> dict[str, str]:
    """Return the engine's request. Raises ValueError, _EngineGone."""
    loop, line = asyncio.get_running_loop(), b""
    try:
        async with asyncio.timeout(_REQUEST_S):
            while not line.endswith(b"\n"):
                with _talking():
                    data = await loop.sock_recv(engine, MAX_LINE_BYTES)
                if not data:
                    raise _EngineGone("it closed the connection before its request")
                line += data
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"a request of more than {MAX_LINE_BYTES} bytes")
    except TimeoutError:
        raise ValueError("no request came") from None
    request = json.loads(line)
    if not isinstance(request, dict) or not all(isinstance(value, str) for value in request.values()):
        raise ValueError("a request must be an object of texts")
    return request


async def _send_file(engine: socket.socket, manifest: Manifest, arrival: HostArrival) -> None:
    fd = arrival.open_file()
    try:
        line = json.dumps({"image": manifest.sha256, "nbytes": manifest.nbytes}).encode() + b"\n"
        with _talking():
            sent = socket.send_fds(engine, [line], [fd])
        if sent != len(line):
            raise _EngineGone("it reads nothing")
    finally:
        os.close(fd)


async def _report(
    manifest: Manifest, arrival: HostArrival, send: Callable[[dict[str, object]], Awaitable[None]]
) -> None:
    """Send each range once it has arrived, in any order."""
    order = asyncio.Queue[tuple[int, int]]()

    async def wait(start: int, end: int) -> None:
        await arrival.wait_for(start, end - start)
        order.put_nowait((start, end))

    ranges = ranges_of(manifest)

    async def report() -> None:
        for _ in ranges:
            await send({"ready": await order.get()})

    await run_all(report(), *(wait(start, end) for start, end in ranges))
    await arrival.complete()
    await send({"done": True})


async def _send(engine: socket.socket, line: dict[str, object]) -> None:
    with _talking():
        await asyncio.get_running_loop().sock_sendall(engine, json.dumps(line).encode() + b"\n")


async def _closed(engine: socket.socket) -> None:
    """Return once the engine has closed its connection."""
    with _talking():
        while await asyncio.get_running_loop().sock_recv(engine, MAX_LINE_BYTES):
            pass
