"""The serving end of a link: answers each request of one peer exactly once."""

import asyncio
import logging
from collections.abc import Callable

from rdmacast.errors import CastError, DeviceError, LinkClosed, ProtocolError, RegionGone
from rdmacast.framing import CastProtocol
from rdmacast.pacer import Pacer
from rdmacast.region_table import Published, RegionTable
from rdmacast.settings import LinkSettings
from rdmacast.verbs_device import QueuePair
from rdmacast.verbs_node import VerbsNode
from rdmacast.wire import (
    MAX_READ_BYTES,
    Ask,
    Cancel,
    Data,
    Error,
    ErrorCode,
    Expose,
    Exposed,
    Frame,
    Have,
    Hello,
    Locate,
    Location,
    Pair,
    Paired,
    Read,
    Ready,
    Request,
    Wait,
    Watch,
)

logger = logging.getLogger(__name__)

MAX_REQUESTS = 4096  # of one link under way at once
_PIECE_BYTES = 256 * 1024  # written at once: about 0.1 ms of the event loop


class _BadRange(CastError):
    """A request for bytes outside the region."""


class _Watching:
    """A WATCH that stands. `news` is set when a map is to be sent, `asked` the question that it answers."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.asked = 0


class ServerLink(CastProtocol):
    """Serves one peer from a table of regions. `opened` and `closed` tell its owner."""

    def __init__(
        self,
        table: RegionTable,
        host: str,
        settings: LinkSettings,
        *,
        pacer: Pacer | None,
        opened: Callable[["ServerLink"], None],
        closed: Callable[["ServerLink"], None],
        count_sent: Callable[[int], None],
        verbs: VerbsNode | None = None,
    ) -> None:
        super().__init__(settings)
        self._table = table
        self._host = host
        self._pacer = pacer
        self._opened = opened
        self._closed = closed
        self._count_sent = count_sent
        self._turn = asyncio.Lock()  # one payload at a time
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._granted: dict[int, asyncio.Event] = {}
        self._watching: dict[int, _Watching] = {}
        self._sending: int | None = None
        self._verbs = verbs
        self._pair: QueuePair | None = None  # by which the peer reads from us

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opened(self)
        self.send(Hello(MAX_READ_BYTES, self._host))

    def link_closed(self, reason: CastError) -> None:
        # Before any lease ends: no READ may see memory that serves something else by then.
        if self._pair is not None:
            self._pair.close()
        for task in self._tasks.values():
            task.cancel()
        self._closed(self)

    async def finished(self) -> None:
        """Return once the connection is gone and no request is under way."""
        await self.wait_closed()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks.values()))

    def frame_received(self, frame: Frame) -> None:
        match frame:
            case Read() | Wait() | Locate() | Watch() | Pair() | Expose():
                self._start(frame)
            case Ask():
                self._asked(frame)
            case Cancel():
                self._cancel(frame.id)
            case _:
                raise ProtocolError(f"{type(frame).__name__} came from a client")

    def _start(self, request: Request) -> None:
        if request.id in self._tasks:
            raise ProtocolError(f"request {request.id} is under way already")
        if len(self._tasks) >= MAX_REQUESTS:
            self.send(Error(request.id, ErrorCode.OVERLOADED, f"more than {MAX_REQUESTS} requests at once"))
            return
        if isinstance(request, Watch):
            self._watching[request.id] = _Watching()
        task = self._loop.create_task(self._answer(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._ended(request.id, task))

    def _asked(self, ask: Ask) -> None:
        watching = self._watching.get(ask.id)
        if watching is not None:  # else its ERROR is on the way, and answers this too
            watching.asked = ask.number
            watching.news.set()

    def _ended(self, id_: int, task: asyncio.Task[None]) -> None:
        del self._tasks[id_]
        self._watching.pop(id_, None)
        # Here and not in the task, for one that is cancelled before its first step runs nothing.
        if task.cancelled():
            self.send(Error(id_, ErrorCode.CANCELLED, ""))

    def _cancel(self, id_: int) -> None:
        """A payload on its way must be finished; all else ends at once. Late cancels are harmless."""
        granted = self._granted.get(id_)
        if granted is not None:
            granted.set()
        elif id_ in self._tasks and id_ != self._sending:
            self._tasks[id_].cancel()

    async def _answer(self, request: Request) -> None:
        try:
            match request:
                case Read():
                    await self._serve_read(request)
                case Wait():
                    await self._serve_wait(request)
                case Locate():
                    source = self._table.find(request.region).source
                    self.send(Location(request.id, source.nbytes, source.shm_path or ""))
                case Watch():
                    await self._serve_watch(request, self._watching[request.id])
                case Pair():
                    self._serve_pair(request)
                case Expose():
                    await self._serve_expose(request)
        except RegionGone as error:
            self.send(Error(request.id, ErrorCode.REGION_GONE, str(error)))
        except (_BadRange, ProtocolError) as error:
            self.send(Error(request.id, ErrorCode.BAD_RANGE, str(error)))
        except DeviceError as error:
            self.send(Error(request.id, ErrorCode.NO_RDMA, str(error)))
        except LinkClosed:
            pass  # nobody is left to answer
        except Exception:
            logger.exception("a request for a region failed")
            self.send(Error(request.id, ErrorCode.INTERNAL, "a fault in the server; see its log"))

    async def _serve_read(self, request: Read) -> None:
        published = self._find(request)
        with published.lease(self):
            await published.wait_for(request.offset, request.length)
            view = published.source.view(request.offset, request.length)
            async with self._turn:
                self._sending = request.id
                try:
                    await self._send_payload(Data(request.id, request.length), view)
                finally:
                    self._sending = None

    async def _serve_wait(self, request: Wait) -> None:
        published = self._find(request)
        with published.lease(self):
            await published.wait_for(request.offset, request.length)
            released = self._granted[request.id] = asyncio.Event()
            try:
                self.send(Ready(request.id, published.serial))
                await released.wait()
            finally:
                del self._granted[request.id]

    def _serve_pair(self, request: Pair) -> None:
        if self._verbs is None:
            raise DeviceError("this node does not offer it")
        if self._pair is not None:
            raise DeviceError("this link has its queue pair already")
        self._pair, answering = self._verbs.answer(request.address)
        self.send(Paired(request.id, answering))

    async def _serve_expose(self, request: Expose) -> None:
        if self._verbs is None or self._pair is None:
            raise DeviceError("this link has no queue pair")
        published = self._find(request)
        with published.lease(self):
            await published.wait_for(request.offset, request.length)
            view = published.source.view(request.offset, request.length)
            released = asyncio.Event()
            with self._verbs.memory.remote(view) as memory:
                self._granted[request.id] = released
                try:
                    self.send(Exposed(request.id, memory))
                    await released.wait()
                finally:
                    del self._granted[request.id]

    async def _serve_watch(self, request: Watch, watching: _Watching) -> None:
        """Maps as they change; those that come while the socket is busy become one."""
        published = await self._table.appeared(request.region)
        with published.watch(watching.news.set):
            while True:
                watching.news.clear()
                asked, watching.asked = watching.asked, 0
                self.send(Have(request.id, asked, published.have_map(request.block_bytes)))
                await self.drained()
                await watching.news.wait()

    def _find(self, request: Read | Wait | Expose) -> Published:
        published = self._table.find(request.region)
        end, nbytes = request.offset + request.length, published.source.nbytes
        if end > nbytes:
            raise _BadRange(f"[{request.offset}, {end}) is outside {request.region} of {nbytes} bytes")
        return published

    async def _send_payload(self, data: Data, view: memoryview) -> None:
        """Send straight from the region's memory; on return no byte of it is in use any more."""
        piece_bytes = self._pacer.piece_bytes if self._pacer else _PIECE_BYTES
        with self.sending_payload(data) as transport:
            for start in range(0, len(view), piece_bytes):
                piece = view[start : start + piece_bytes]
                if self._pacer is not None:
                    wait_s = self._pacer.reserve(self._loop.time(), len(piece))
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                transport.write(piece)
                self._count_sent(len(piece))
                await self.drained()
