"""The serving end of a link: answers each request of one peer exactly once."""

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext

from rdmacast.cuda_ipc_lender import GpuLender
from rdmacast.errors import CastError, DeviceError, LinkClosed, NotShared, ProtocolError, RegionGone
from rdmacast.frames import (
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
    Lend,
    Lent,
    Locate,
    Location,
    Meet,
    Met,
    Pair,
    Paired,
    RangeRequest,
    Read,
    Ready,
    Request,
    Show,
    Shown,
    Steer,
    Take,
    Tell,
    Wait,
    Watch,
)
from rdmacast.framing import CastProtocol
from rdmacast.gpu_source import gpu_pointer
from rdmacast.nixl_node import NixlNode
from rdmacast.observer import Observers
from rdmacast.pacer import Pacer
from rdmacast.region_table import Published, RegionTable
from rdmacast.settings import LinkSettings
from rdmacast.transport import RegionSource
from rdmacast.turns import Turns
from rdmacast.verbs_address import RemoteMemory
from rdmacast.verbs_device import QueuePair
from rdmacast.verbs_memory import RegisteredMemory
from rdmacast.verbs_node import VerbsNode
from rdmacast.wire import MAX_READ_BYTES, encode

logger = logging.getLogger(__name__)

_NEWS_S = 0.1  # between two maps of one WATCH, but for answers
_UNSENT_BYTES = 256 * 1024  # in the kernel, of a connection

MAX_REQUESTS = 4096  # of one link under way at once
_PIECE_BYTES = 1 << 20  # written at once; the kernel takes less of it at a time


class _BadRange(CastError):
    """A request for bytes outside the region."""


class _Watching:
    """A WATCH that stands. `news` is set when a map is to be sent, `asked` the question that it answers.

    What changes soon after a map waits for more: who watches pulls by its plan, and learns from maps only
    what else there would be.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.news = asyncio.Event()
        self.asked = 0
        self._loop = loop
        self._told_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._told_s + _NEWS_S, self._loop.time()), self.news.set)

    def told(self) -> None:
        """A map is about to leave."""
        self.news.clear()
        self._told_s = self._loop.time()
        self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ServerLink(CastProtocol):
    """Serves one peer from a table of regions. `opened` and `closed` tell its owner."""

    def __init__(
        self,
        table: RegionTable,
        host: str,
        settings: LinkSettings,
        *,
        pacer: Pacer | None,
        turns: Turns | None = None,
        opened: Callable[["ServerLink"], None],
        closed: Callable[["ServerLink"], None],
        count_sent: Callable[[int], None],
        verbs: VerbsNode | None = None,
        lender: GpuLender | None = None,
        nixl: NixlNode | None = None,
        observers: Observers,
    ) -> None:
        super().__init__(settings, reads_ahead=True)
        self._table = table
        self._host = host
        self._pacer = pacer
        self._turns = turns or Turns()
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
        self._lender = lender
        self._nixl = nixl
        self._observers = observers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opened(self)
        _keep_little_unsent(transport)
        self.send(Hello(MAX_READ_BYTES, self._host))

    def link_closed(self, reason: CastError) -> None:
        # Before any lease ends: no READ may see memory that serves something else by then.
        if self._pair is not None:
            self._pair.close()
        for task in self._tasks.values():
            task.cancel()
        self._observers.forget(self)
        self._closed(self)

    async def finished(self) -> None:
        """Return once the connection is gone and no request is under way."""
        await self.wait_closed()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks.values()))

    def frame_received(self, frame: Frame) -> None:
        match frame:
            case RangeRequest() | Locate() | Watch() | Pair() | Meet():
                self._start(frame)
            case Ask():
                self._asked(frame)
            case Tell():
                self._observers.heard(
                    self, frame.report, lambda verdict: self.send(Steer(frame.id, verdict)), self._loop.time()
                )
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
            self._watching[request.id] = _Watching(self._loop)
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
                case Read() | Take():
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
                case Lend():
                    await self._serve_lend(request)
                case Meet():
                    await self._serve_meet(request)
                case Show():
                    await self._serve_show(request)
        except NotShared as error:
            self.send(Error(request.id, ErrorCode.NOT_SHARED, str(error)))
        except RegionGone as error:
            self.send(Error(request.id, ErrorCode.REGION_GONE, str(error)))
        except (_BadRange, ProtocolError) as error:
            self.send(Error(request.id, ErrorCode.BAD_RANGE, str(error)))
        except DeviceError as error:
            self.send(Error(request.id, ErrorCode.NO_RDMA, str(error)))
        except LinkClosed:
            pass  # nobody is left to answer
        except Exception:  # a fault of ours ends one request, not the link
            logger.exception("a request for a region failed")
            self.send(Error(request.id, ErrorCode.INTERNAL, "a fault in the server; see its log"))

    async def _serve_read(self, request: Read | Take) -> None:
        published, offset, nbytes = self._find(request), request.offset, request.length
        with published.lease(self):
            await published.wait_for(offset, nbytes)
            view = published.source.view(offset, nbytes)
            # A pacer shares the rate by itself.
            due = request.due if isinstance(request, Take) else None
            turn = self._turns.turn(nbytes, offset, due) if self._pacer is None else nullcontext()
            async with self._turn, turn:
                self._sending = request.id
                try:
                    await self._send_payload(Data(request.id, nbytes), view)
                finally:
                    self._sending = None

    async def _serve_wait(self, request: Wait) -> None:
        async with self._present(request) as published:
            await self._grant(Ready(request.id, published.serial))

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
        async with self._present(request) as published:
            with _registered(self._verbs.memory, published.source, request) as memory:
                await self._grant(Exposed(request.id, memory))

    async def _serve_lend(self, request: Lend) -> None:
        if self._lender is None:
            raise NotShared("this node lends no memory of a GPU")
        async with self._present(request) as published:
            pointer = gpu_pointer(published.source, request.offset, request.length)
            if pointer is None:
                raise NotShared(f"region {request.region} is not on a GPU")
            lent = self._lender.lend(pointer, request.length)
            await self._grant(Lent(request.id, lent))

    async def _serve_meet(self, request: Meet) -> None:
        if self._nixl is None:
            raise NotShared("this node offers no NIXL")
        with self._nixl.meeting() as meeting:
            await self._grant(Met(request.id, meeting))

    async def _serve_show(self, request: Show) -> None:
        if self._nixl is None:
            raise NotShared("this node offers no NIXL")
        async with self._present(request) as published:
            view = published.source.view(request.offset, request.length)
            with self._nixl.showing(view) as shown:
                await self._grant(Shown(request.id, shown))

    @asynccontextmanager
    async def _present(self, request: RangeRequest) -> AsyncIterator[Published]:
        """Inside, the range is there and its memory is kept."""
        published = self._find(request)
        with published.lease(self):
            await published.wait_for(request.offset, request.length)
            yield published

    async def _grant(self, answer: Ready | Exposed | Lent | Met | Shown) -> None:
        """What the answer grants stands until the peer's CANCEL."""
        released = self._granted[answer.id] = asyncio.Event()
        try:
            self.send(answer)
            await released.wait()
        finally:
            del self._granted[answer.id]

    async def _serve_watch(self, request: Watch, watching: _Watching) -> None:
        """Maps as they change; those that come while the socket is busy become one."""
        published = await self._table.appeared(request.region)
        with published.watch(watching.changed), closing(watching):
            while True:
                watching.told()
                asked, watching.asked = watching.asked, 0
                self.send(Have(request.id, asked, published.have_map(request.block_bytes)))
                await self.drained()
                await watching.news.wait()

    def _find(self, request: RangeRequest) -> Published:
        published = self._table.find(request.region)
        end, nbytes = request.offset + request.length, published.source.nbytes
        if end > nbytes:
            raise _BadRange(f"[{request.offset}, {end}) is outside {request.region} of {nbytes} bytes")
        return published

    async def _send_payload(self, data: Data, view: memoryview) -> None:
        """Send straight from the region's memory; on return no byte of it is in use any more."""
        piece_bytes = self._pacer.piece_bytes if self._pacer else _PIECE_BYTES
        with self.sending_payload() as transport:
            head = encode(data)
            for start in range(0, len(view), piece_bytes):
                piece = view[start : start + piece_bytes]
                if self._pacer is not None:
                    wait_s = self._pacer.reserve(self._loop.time(), len(piece))
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                if head:  # in one write: else it goes ahead in a packet of its own
                    transport.writelines((head, piece))
                    head = b""
                else:
                    transport.write(piece)
                self._count_sent(len(piece))
                await self.drained()


def _keep_little_unsent(transport: asyncio.BaseTransport) -> None:
    """Else several payloads lie in the kernel at once and share the port, whoever's turn it is."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def _registered(
    memory: RegisteredMemory, source: RegionSource, request: Expose
) -> AbstractContextManager[RemoteMemory]:
    """The range, registered for reads by RDMA, wherever it is."""
    pointer = gpu_pointer(source, request.offset, request.length)
    if pointer is not None:
        return memory.remote_at(pointer, request.length)
    return memory.remote(source.view(request.offset, request.length))
