"""Where links to this node's stages come in: over TCP, and over a Unix socket from nodes of the same host."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from invoker.engine.kv_cache import KvShape
from invoker.engine.kv_slices import KvSlice
from invoker.stages.frames import LinkLost
from invoker.stages.kv_link import receive_kv, send_kv
from invoker.stages.kv_shelf import KvShelf
from invoker.stages.link import StageKey, admit, answer, dial, local_name
from invoker.threads import in_own_thread
from rdmacast.address import Endpoint
from rdmacast.tls import NodeTls
from registry.live_messages import KvStage

MAX_STRANGERS = 64  # connections that have not shown yet what they want
GIVE_KV_S = 60.0  # a slice of K and V: whoever wants it gives up sooner

log = logging.getLogger("invoker.stages")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedKv:
    """What a stage put aside, and how long its bytes took over the link, without what it took to put them
    aside: 0 for what lay here."""

    kv: KvSlice
    link_s: float


class Door:
    """Belongs to the event loop's thread. `host`: nodes with an equal one are reached by Unix socket. What
    lies on the `shelf` is given to whoever asks for it."""

    def __init__(self, listen_host: str, port: int, advertise: str, host: str, secret: bytes, tls: NodeTls):
        self.host = host
        self.shelf = KvShelf()
        self._bind = (listen_host, port)
        self._advertise = advertise
        self._secret = secret
        self._tls = tls
        self._url = ""
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._awaited: dict[StageKey, asyncio.Future[socket.socket]] = {}

    def __repr__(self) -> str:
        return f"<Door {self._url} awaits {len(self._awaited)} links>"

    async def __aenter__(self) -> "Door":
        """Listen. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._bind[0] else socket.AF_INET
        tcp = socket.create_server(self._bind, family=family, backlog=128)
        self._listening.append(tcp)
        self._url = Endpoint(self._advertise, tcp.getsockname()[1]).url
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.append(local)
        local.bind(local_name(self._url))
        local.listen(128)
        for one in self._listening:
            one.setblocking(False)
            self._own(self._accept(one), "stage door")
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        for stranger in tuple(self._strangers):
            _cut(stranger)
        if self._tasks:
            await asyncio.wait(self._tasks)
        for one in self._listening:
            one.close()
        self.shelf.clear()

    @property
    def url(self) -> str:
        return self._url

    @contextmanager
    def awaiting(self, key: StageKey) -> Iterator["asyncio.Future[socket.socket]"]:
        """Inside, the first link to that stage is what the future gives; it is closed at the end."""
        assert key not in self._awaited, f"{key} is awaited twice"
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._awaited[key] = future
        try:
            yield future
        finally:
            del self._awaited[key]
            if not future.cancel() and not future.cancelled():
                future.result().close()

    async def dial(self, url: str, host: str, key: StageKey) -> socket.socket:
        """A link to a stage of another node, or of this one. Raises LinkLost."""
        made: list[socket.socket] = []
        given_up = threading.Event()

        def connect() -> None:
            one = dial(url, key, self._secret, same_host=host == self.host, tls=self._tls.client)
            made.append(one)
            if given_up.is_set():
                one.close()

        try:
            await in_own_thread(connect)
        except asyncio.CancelledError:
            given_up.set()
            for one in made:
                one.close()
            raise
        return made[0]

    async def fetch_kv(
        self, stage: KvStage, key: StageKey, shape: KvShape, most_tokens: int, within_s: float
    ) -> FetchedKv:
        """What the stage put aside of a sequence, of at most so many tokens of a model of `shape`. The thread
        that gets it may outlive a caller who is cancelled, for no longer than that. Raises LinkLost."""
        if stage.link == self._url:
            own = await self.shelf.take(key, within_s)
            if own is None:
                raise LinkLost(f"{key} has put nothing aside")
            return FetchedKv(kv=own, link_s=0.0)
        got: list[FetchedKv] = []

        def fetch() -> None:
            local, tls = stage.host == self.host, self._tls.client
            with closing(
                dial(stage.link, key, self._secret, same_host=local, tls=tls, answer_s=within_s)
            ) as link:
                began_s = time.monotonic()
                kv = receive_kv(link, shape, (stage.first, stage.last), most_tokens, within_s)
                got.append(FetchedKv(kv=kv, link_s=time.monotonic() - began_s))

        try:
            await in_own_thread(fetch)
        except OSError as error:
            raise LinkLost(f"K and V of {key} did not come: {error}") from error
        return got[0]

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many files, for one
                log.warning("a link to a stage could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _cut(oldest)
            self._strangers[accepted] = None
            self._own(self._meet(accepted), "stage link")

    async def _meet(self, accepted: socket.socket) -> None:
        """Learn which stage a peer wants, and give its socket to who waits for that."""
        admitted: list[tuple[socket.socket, StageKey]] = []
        given_up = threading.Event()

        def ask() -> None:
            accepted.setblocking(True)
            admitted.append(admit(accepted, self._secret, self._tls.server))
            if given_up.is_set():
                admitted[0][0].close()

        try:
            await in_own_thread(ask)
        except LinkLost as error:
            log.info("refused a link to a stage: %s", error)
            return
        except asyncio.CancelledError:
            given_up.set()
            _cut(accepted)
            for one, _ in admitted:
                one.close()
            raise
        finally:
            self._strangers.pop(accepted, None)
        link, key = admitted[0]
        if key.sequence:
            await self._give_kv(link, key)
            return
        future = self._awaited.get(key)
        wanted = future is not None and not future.done()
        try:
            answer(link, taken=wanted)  # one byte: it never has to wait
        except OSError:
            link.close()
            return
        if future is not None and wanted:
            future.set_result(link)
        else:
            link.close()

    async def _give_kv(self, link: socket.socket, key: StageKey) -> None:
        try:
            one = await self._asked_for(link, key)
        except asyncio.CancelledError:
            link.close()
            raise

        def give() -> None:
            with closing(link), suppress(OSError):  # whoever asked has given up
                answer(link, taken=one is not None)
                if one is not None:
                    send_kv(link, one, GIVE_KV_S)

        await in_own_thread(give)

    async def _asked_for(self, link: socket.socket, key: StageKey) -> KvSlice | None:
        """What the shelf has of it, or comes to have before whoever asks hangs up."""
        loop = asyncio.get_running_loop()
        taking = asyncio.create_task(self.shelf.take(key, GIVE_KV_S), name=f"K and V of {key}")
        loop.add_reader(link.fileno(), taking.cancel)  # they have nothing more to say
        try:
            await asyncio.wait([taking])
        finally:
            loop.remove_reader(link.fileno())
            taking.cancel()
        return None if taking.cancelled() else taking.result()

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _cut(one: socket.socket) -> None:
    """End what a thread is reading from it."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
