"""The serving end of a link: answers each request of one peer exactly once."""

import asyncio
import logging
import math
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing, nullcontext
from dataclasses import dataclass

from rdmacast.errors import CastError, DeviceError, LinkClosed, NotShared, ProtocolError, RegionGone
from rdmacast.exporter import ExportedRange
from rdmacast.gpu_source import gpu_pointer, host_views
from rdmacast.pacer import Pacer
from rdmacast.protocol.frames import (
    Cancel,
    Data,
    Error,
    ErrorCode,
    Frame,
    Greeting,
    Have,
    HaveRequest,
    Read,
    Replan,
    Report,
    Request,
    SlotRead,
    TransportReply,
    TransportRequest,
    Watch,
)
from rdmacast.protocol.framing import CastProtocol
from rdmacast.protocol.priority import make_bulk
from rdmacast.protocol.wire import MAX_READ_BYTES, encode
from rdmacast.server.exporter_registry import ExporterRegistry, LinkExports
from rdmacast.server.port_arbiter import PortArbiter
from rdmacast.server.region_table import PublishedRegion, RegionTable
from rdmacast.settings import LinkSettings
from rdmacast.stragglers.detector import StragglerDetectors

logger = logging.getLogger(__name__)

_BITFIELD_INTERVAL_S = 0.1  # between two bitfields of one WATCH, except answers
_UNSENT_BYTES = 256 * 1024  # in the kernel, of a connection

MAX_REQUESTS = 4096  # concurrent, of one link
_PIECE_BYTES = 1 << 20  # written at once; the kernel accepts less at a time


class _BadRange(CastError):
    """A request for bytes outside the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """What the links of one region server share. Without a pacer the arbiter orders the payloads."""

    table: RegionTable
    host: str
    settings: LinkSettings
    pacer: Pacer | None
    arbiter: PortArbiter
    exporters: ExporterRegistry
    detectors: StragglerDetectors


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvents:
    """Callbacks of a link: opened, closed, and the number of payload bytes sent."""

    on_open: Callable[["ServerLink"], None]
    on_close: Callable[["ServerLink"], None]
    on_sent: Callable[[int], None]


class _BitfieldUpdates:
    """The pace of one WATCH: `ready` is set when a bitfield is to be sent, in answer to request `number`.

    Changes soon after a bitfield are collected: a watching node pulls by its plan, and uses bitfields only to
    find other sources.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ready = asyncio.Event()
        self.number = 0
        self._loop = loop
        self._sent_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def on_change(self) -> None:
        if self._timer is None:
            at_s = max(self._sent_s + _BITFIELD_INTERVAL_S, self._loop.time())
            self._timer = self._loop.call_at(at_s, self.ready.set)

    def on_request(self, number: int) -> None:
        self.number = number
        self.ready.set()

    def on_send(self) -> int:
        """Start the next interval; returns the number of the request that this bitfield answers, or 0."""
        self.ready.clear()
        self._sent_s = self._loop.time()
        self.close()
        number, self.number = self.number, 0
        return number

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ServerLink(CastProtocol):
    """A connection that serves one peer from the regions of its server."""

    def __init__(self, context: ServerContext, events: LinkEvents) -> None:
        super().__init__(context.settings, reads_ahead=True)
        self._context = context
        self._events = events
        self._exports = LinkExports(context.exporters)
        self._payload_lock = asyncio.Lock()  # one payload at a time
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._grants: dict[int, asyncio.Event] = {}  # set by the peer's CANCEL
        self._watches: dict[int, _BitfieldUpdates] = {}
        self._sending: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._events.on_open(self)
        _tune(transport)
        self.send(Greeting(MAX_READ_BYTES, self._context.host))

    def link_closed(self, reason: CastError) -> None:
        # Before any lease ends: no READ may see memory that is used for something else by then.
        self._exports.close()
        for task in self._tasks.values():
            task.cancel()
        self._events.on_close(self)

    async def finished(self) -> None:
        """Return once the connection is closed and no request is pending."""
        await self.wait_closed()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks.values()))

    def frame_received(self, frame: Frame) -> None:
        match frame:
            case Read() | TransportRequest() | Watch():
                self._start(frame)
            case HaveRequest():
                updates = self._watches.get(frame.id)
                if updates is not None:  # else its ERROR has been sent, and answers this too
                    updates.on_request(frame.number)
            case Report():
                self._on_report(frame)
            case Cancel():
                self._cancel(frame.id)
            case _:
                raise ProtocolError(f"{type(frame).__name__} was received from a client")

    def _on_report(self, frame: Report) -> None:
        if frame.id not in self._watches:  # it has ended: its reporter is forgotten
            return
        self._context.detectors.on_report(
            (self, frame.id),
            frame.report,
            lambda verdict: self.send(Replan(frame.id, verdict)),
            self._loop.time(),
        )

    def _start(self, request: Request) -> None:
        if request.id in self._tasks:
            raise ProtocolError(f"request {request.id} is pending already")
        if len(self._tasks) >= MAX_REQUESTS:
            self.send(Error(request.id, ErrorCode.OVERLOADED, f"more than {MAX_REQUESTS} requests at once"))
            return
        if isinstance(request, Watch):
            self._watches[request.id] = _BitfieldUpdates(self._loop)
        task = self._loop.create_task(self._answer(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._on_answered(request.id, task))

    def _on_answered(self, id_: int, task: asyncio.Task[None]) -> None:
        del self._tasks[id_]
        if self._watches.pop(id_, None) is not None:
            self._context.detectors.forget((self, id_))
        # Here and not in the task: one that is cancelled before its first step runs nothing.
        if task.cancelled():
            self.send(Error(id_, ErrorCode.CANCELLED, ""))

    def _cancel(self, id_: int) -> None:
        """End a request: a payload being sent is finished, all else ends at once. Late cancels do nothing."""
        granted = self._grants.get(id_)
        if granted is not None:
            granted.set()
        elif id_ in self._tasks and id_ != self._sending:
            self._tasks[id_].cancel()

    async def _answer(self, request: Request) -> None:
        try:
            match request:
                case Read():
                    await self._serve_read(request)
                case TransportRequest():
                    await self._serve_transport(request)
                case Watch():
                    await self._serve_watch(request, self._watches[request.id])
        except (NotShared, DeviceError) as error:
            self.send(Error(request.id, ErrorCode.NOT_SHARED, str(error)))
        except RegionGone as error:
            self.send(Error(request.id, ErrorCode.REGION_GONE, str(error)))
        except (_BadRange, ProtocolError) as error:
            self.send(Error(request.id, ErrorCode.BAD_REQUEST, str(error)))
        except LinkClosed:
            pass  # there is no peer to answer
        except Exception:  # a fault of ours ends one request, not the link
            logger.exception("a request for a region failed")
            self.send(Error(request.id, ErrorCode.INTERNAL, "a fault in the server; see its log"))

    async def _serve_read(self, request: Read) -> None:
        published, offset, nbytes = self._find(request), request.offset, request.length
        with published.lease(self):
            await published.wait_for(offset, nbytes)
            # Taken before this waits for the port: what is viewed stays in memory.
            on_gpu = gpu_pointer(published.source, offset, nbytes) is not None
            view = None if on_gpu else published.source.view(offset, nbytes)
            slot = request.slot if isinstance(request, SlotRead) else None
            # A pacer shares the rate by itself.
            paced, arbiter = self._context.pacer is not None, self._context.arbiter
            port = nullcontext() if paced else arbiter.grant(nbytes, offset, slot)
            async with self._payload_lock, port:
                self._sending = request.id
                try:
                    views = host_views(published.source, offset, nbytes, view)
                    await self._send_payload(Data(request.id, nbytes), views)
                finally:
                    self._sending = None

    async def _serve_transport(self, request: TransportRequest) -> None:
        session = self._exports.session(request.kind)
        if not request.region:
            with session.connect(request.payload) as reply:
                await self._grant(TransportReply(request.id, reply))
            return
        published = self._find(request)
        with published.lease(self):
            await published.wait_for(request.offset, request.length)
            exported = ExportedRange(
                region=request.region,
                serial=published.serial,
                source=published.source,
                offset=request.offset,
                nbytes=request.length,
            )
            with session.export(exported) as reply:
                await self._grant(TransportReply(request.id, reply))

    async def _grant(self, reply: TransportReply) -> None:
        """Send the reply, and return once the peer has released what it grants."""
        released = self._grants[reply.id] = asyncio.Event()
        try:
            self.send(reply)
            await released.wait()
        finally:
            del self._grants[reply.id]

    async def _serve_watch(self, request: Watch, updates: _BitfieldUpdates) -> None:
        """Send bitfields as they change; those made while the socket is busy become one."""
        published = await self._context.table.wait_published(request.region)
        with published.watch(updates.on_change), closing(updates):
            while True:
                number = updates.on_send()
                self.send(Have(request.id, number, published.bitfield(request.block_bytes)))
                await self.drained()
                await updates.ready.wait()

    def _find(self, request: Read | TransportRequest) -> PublishedRegion:
        """Return the region of the request. Raises RegionGone and _BadRange."""
        published = self._context.table.find(request.region)
        end, nbytes = request.offset + request.length, published.source.nbytes
        if end > nbytes:
            raise _BadRange(f"[{request.offset}, {end}) is outside {request.region} of {nbytes} bytes")
        return published

    async def _send_payload(self, data: Data, views: AsyncGenerator[memoryview, None]) -> None:
        """Send straight from the region's memory; on return no byte of it is in use any more."""
        head = encode(data)
        with self.sending_payload() as transport:
            async with aclosing(views):
                async for view in views:
                    await self._send_view(transport, head, view)
                    head = b""

    async def _send_view(self, transport: asyncio.Transport, head: bytes, view: memoryview) -> None:
        pacer = self._context.pacer
        piece_bytes = pacer.piece_bytes if pacer else _PIECE_BYTES
        for start in range(0, len(view), piece_bytes):
            piece = view[start : start + piece_bytes]
            if pacer is not None:
                wait_s = pacer.reserve(self._loop.time(), len(piece))
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
            if head:  # in one write: else it is sent ahead in a packet of its own
                transport.writelines((head, piece))
                head = b""
            else:
                transport.write(piece)
            self._events.on_sent(len(piece))
            await self.drained()


def _tune(transport: asyncio.BaseTransport) -> None:
    """Leave links to what serves, and keep little in the kernel.

    Several payloads there would share the port, whichever has the grant.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        make_bulk(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
