"""Accepts links to this node's stages, over TCP and, from nodes of the same host, a Unix socket."""

import asyncio
import logging
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from invoker.base.accepting import accepted
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.export import KvExport
from invoker.engine.kv.slices import KvSlice
from invoker.links.export_buffer import KvExportBuffer
from invoker.links.framing import LinkLost
from invoker.links.kv_link import receive_kv, send_kv
from invoker.links.link import StageKey, admit, dial, local_name, reply
from rdmacast.address import TcpAddress
from rdmacast.aio.threads import run_in_daemon_thread
from rdmacast.protocol.handshake import Secret
from rdmacast.protocol.tls import NodeTls
from registry.messages.live import KvStage

MAX_HANDSHAKES = 64  # unauthenticated connections; beyond, the oldest is closed
SEND_KV_TIMEOUT_S = 60.0  # one sequence's K and V; the receiver has a shorter timeout

log = logging.getLogger("invoker.stages")


class StageListener:
    """A listener for stage links; peers fetch exported K and V from `exports`.

    Nodes with an equal `host` are reached by Unix socket. Belongs to the event loop's thread.
    """

    def __init__(self, listen_host: str, port: int, advertise: str, host: str, secret: Secret, tls: NodeTls):
        self.host = host
        self.exports = KvExportBuffer()
        self._bind = (listen_host, port)
        self._advertise = advertise
        self._secret = secret
        self._tls = tls
        self._url = ""
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: dict[socket.socket, None] = {}  # oldest first
        self._expected: dict[StageKey, asyncio.Future[socket.socket]] = {}

    def __repr__(self) -> str:
        return f"<StageListener {self._url} expects {len(self._expected)} links>"

    async def __aenter__(self) -> "StageListener":
        """Start listening. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._bind[0] else socket.AF_INET
        tcp = socket.create_server(self._bind, family=family, backlog=128)
        self._listening.append(tcp)
        self._url = TcpAddress(self._advertise, tcp.getsockname()[1]).url
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.append(local)
        local.bind(local_name(self._url))
        local.listen(128)
        for one in self._listening:
            one.setblocking(False)
            self._spawn(self._accept(one), "stage listener")
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        for pending in tuple(self._handshakes):
            _shut_down(pending)
        if self._tasks:
            await asyncio.wait(self._tasks)
        for one in self._listening:
            one.close()
        self.exports.clear()

    @property
    def url(self) -> str:
        return self._url

    @contextmanager
    def expect_link(self, key: StageKey) -> Iterator["asyncio.Future[socket.socket]"]:
        """Expect one link to that stage: the future yields its socket, which is closed with the block."""
        assert key not in self._expected, f"{key} is expected twice"
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._expected[key] = future
        try:
            yield future
        finally:
            del self._expected[key]
            if not future.cancel() and not future.cancelled():
                future.result().close()

    async def dial(self, url: str, host: str, key: StageKey) -> socket.socket:
        """Connect to a stage of another node, or of this one. Raises LinkLost."""
        links: list[socket.socket] = []
        cancelled = threading.Event()

        def connect() -> None:
            one = dial(url, key, self._secret, same_host=host == self.host, tls=self._tls.client)
            links.append(one)
            if cancelled.is_set():
                one.close()

        try:
            await run_in_daemon_thread(connect)
        except asyncio.CancelledError:
            cancelled.set()
            for one in links:
                one.close()
            raise
        return links[0]

    async def fetch_kv(
        self, stage: KvStage, key: StageKey, shape: KvShape, max_tokens: int, timeout_s: float
    ) -> KvSlice:
        """Fetch the K and V that a stage exported of a sequence of at most `max_tokens` tokens.

        A cancelled caller leaves its thread behind, for at most `timeout_s`. Raises LinkLost.
        """
        own = await self.exports.pop(key, timeout_s) if stage.link == self._url else None
        if own is None and stage.link == self._url:
            raise LinkLost(f"{key} exported no K and V of sequence {key.sequence}")
        fetched: list[KvSlice] = []

        def fetch() -> None:
            if own is not None:
                fetched.append(own.wait(timeout_s))
                return
            local, tls = stage.host == self.host, self._tls.client
            with closing(
                dial(stage.link, key, self._secret, same_host=local, tls=tls, reply_s=timeout_s)
            ) as link:
                fetched.append(receive_kv(link, shape, (stage.first, stage.last), max_tokens, timeout_s))

        try:
            await run_in_daemon_thread(fetch)
        except OSError as error:
            raise LinkLost(f"cannot fetch K and V of {key}: {error}") from error
        return fetched[0]

    async def _accept(self, listening: socket.socket) -> None:
        async for one in accepted(listening, log):
            if len(self._handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                _shut_down(oldest)
            self._handshakes[one] = None
            self._spawn(self._admit(one), "stage link")

    async def _admit(self, accepted: socket.socket) -> None:
        """Authenticate a peer and hand its socket to the stage that expects it."""
        admitted: list[tuple[socket.socket, StageKey]] = []
        cancelled = threading.Event()

        def authenticate() -> None:
            accepted.setblocking(True)
            admitted.append(admit(accepted, self._secret, self._tls.server))
            if cancelled.is_set():
                admitted[0][0].close()

        try:
            await run_in_daemon_thread(authenticate)
        except LinkLost as error:
            log.info("refused a stage link: %s", error)
            return
        except asyncio.CancelledError:
            cancelled.set()
            _shut_down(accepted)
            for one, _ in admitted:
                one.close()
            raise
        finally:
            self._handshakes.pop(accepted, None)
        link, key = admitted[0]
        if key.sequence:
            await self._send_kv(link, key)
            return
        future = self._expected.get(key)
        is_expected = future is not None and not future.done()
        try:
            reply(link, accepted=is_expected)  # one byte: never blocks
        except OSError:
            link.close()
            return
        if future is not None and is_expected:
            future.set_result(link)
        else:
            link.close()

    async def _send_kv(self, link: socket.socket, key: StageKey) -> None:
        try:
            kv = await self._exported(link, key)
        except asyncio.CancelledError:
            link.close()
            raise

        def send() -> None:
            with closing(link), suppress(OSError):  # the peer has timed out
                reply(link, accepted=kv is not None)
                if kv is not None:
                    send_kv(link, kv, SEND_KV_TIMEOUT_S)

        await run_in_daemon_thread(send)

    async def _exported(self, link: socket.socket, key: StageKey) -> KvExport | None:
        """Wait for the export until the peer hangs up."""
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(self.exports.pop(key, SEND_KV_TIMEOUT_S), name=f"K and V of {key}")
        loop.add_reader(link.fileno(), waiting.cancel)  # readable only when the peer hangs up
        try:
            await asyncio.wait([waiting])
        finally:
            loop.remove_reader(link.fileno())
            waiting.cancel()
        return None if waiting.cancelled() else waiting.result()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _shut_down(one: socket.socket) -> None:
    """End a read that a thread has under way."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
