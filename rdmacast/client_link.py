"""The reading end of a link: requests go out pipelined, payload lands in the caller's buffer."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from rdmacast.connection import dial
from rdmacast.cuda_ipc_memory import LentMemory
from rdmacast.due import Due
from rdmacast.errors import CastError, LinkClosed, NotShared, ProtocolError, RegionGone
from rdmacast.frames import (
    Cancel,
    Data,
    Error,
    ErrorCode,
    Expose,
    Exposed,
    Frame,
    Hello,
    Lend,
    Lent,
    Locate,
    Location,
    Meet,
    Met,
    Pair,
    Paired,
    Read,
    Ready,
    Show,
    Shown,
    Take,
    Wait,
)
from rdmacast.framing import CastProtocol
from rdmacast.nixl_memory import Meeting, ShownMemory
from rdmacast.pacer import Pacer
from rdmacast.settings import LinkSettings
from rdmacast.transport import Began
from rdmacast.verbs_address import Answering, QueuePairAddress, RemoteMemory
from rdmacast.wire import SERVICE

Request = Read | Take | Wait | Locate | Pair | Expose | Lend | Meet | Show
Answer = Data | Ready | Location | Paired | Exposed | Lent | Met | Shown
A = TypeVar("A", Ready, Exposed, Lent, Met, Shown)
T = TypeVar("T")

_ANSWERS: Mapping[type, type] = {
    Read: Data,
    Take: Data,
    Wait: Ready,
    Locate: Location,
    Pair: Paired,
    Expose: Exposed,
    Lend: Lent,
    Meet: Met,
    Show: Shown,
}


@dataclass(slots=True, eq=False)
class _Pending:
    """A request whose answer is due. `into` is None when its caller has left."""

    request: Request
    answer: "asyncio.Future[Answer]"
    into: memoryview | None
    began: Began | None = None


class ClientLink(CastProtocol):
    """Asks one peer. A cancelled request's answer is still read, and dropped."""

    def __init__(self, settings: LinkSettings, pacer: Pacer | None = None) -> None:
        super().__init__(settings)
        self._pacer = pacer
        self._hello: asyncio.Future[Hello] = self._loop.create_future()
        self._pending: dict[int, _Pending] = {}
        self._next_id = 1
        self._resume: asyncio.TimerHandle | None = None
        self._on_closed: list[Callable[[CastError], None]] = []
        self.received_bytes = 0  # of payloads

    async def hello(self) -> Hello:
        """The server's greeting. Raises LinkClosed or ProtocolError."""
        return await asyncio.shield(self._hello)

    async def read(
        self,
        region: str,
        offset: int,
        into: memoryview,
        began: Began | None = None,
        due: Due | None = None,
    ) -> None:
        """Fill `into` (at most the server's longest read) from the region; `began` as of Link."""
        range_ = self._new_id(), region, offset, len(into)
        await self._ask(Read(*range_) if due is None else Take(*range_, due), into, began)

    async def locate(self, region: str) -> Location:
        answer = await self._ask(Locate(self._new_id(), region), None)
        assert isinstance(answer, Location)
        return answer

    def granted(self, region: str, offset: int, nbytes: int) -> AbstractAsyncContextManager[int]:
        """Inside, the range is present and the server keeps the region's memory; yields its serial number."""
        return self._during(Wait(self._new_id(), region, offset, nbytes), Ready, lambda answer: answer.serial)

    async def pair(self, address: QueuePairAddress) -> Answering:
        """Have the server make the queue pair that is to answer ours. Raises NotShared."""
        answer = await self._ask(Pair(self._new_id(), address), None)
        assert isinstance(answer, Paired)
        return answer.answering

    def exposed(self, region: str, offset: int, nbytes: int) -> AbstractAsyncContextManager[RemoteMemory]:
        """Inside, the range is present, and may be read by RDMA from where this yields."""
        return self._during(
            Expose(self._new_id(), region, offset, nbytes), Exposed, lambda answer: answer.memory
        )

    def lent(self, region: str, offset: int, nbytes: int) -> AbstractAsyncContextManager[LentMemory]:
        """Inside, the range is present, and its allocation on a GPU may be open. Raises NotShared."""
        return self._during(Lend(self._new_id(), region, offset, nbytes), Lent, lambda answer: answer.memory)

    def met(self) -> AbstractAsyncContextManager[Meeting]:
        """Inside, the server's NIXL agent answers reads of its test. Raises NotShared."""
        return self._during(Meet(self._new_id()), Met, lambda answer: answer.meeting)

    def shown(self, region: str, offset: int, nbytes: int) -> AbstractAsyncContextManager[ShownMemory]:
        """Inside, the range is present, and may be read by NIXL. Raises NotShared."""
        return self._during(Show(self._new_id(), region, offset, nbytes), Shown, lambda answer: answer.memory)

    def on_closed(self, told: Callable[[CastError], None]) -> None:
        """`told` is called when the link closes; at once if it has."""
        self._on_closed.append(told)
        if self.reason is not None:
            told(self.reason)

    async def aclose(self) -> None:
        self.abort(LinkClosed("the link was closed"))
        await self.wait_closed()

    @asynccontextmanager
    async def _during(self, request: Request, kind: type[A], granted: Callable[[A], T]) -> AsyncIterator[T]:
        """Inside, what the answer to `request` grants stands."""
        answer = await self._ask(request, None)
        assert isinstance(answer, kind)
        try:
            yield granted(answer)
        finally:
            self.send(Cancel(request.id))

    async def _ask(self, request: Request, into: memoryview | None, began: Began | None = None) -> Answer:
        if self.reason is not None:
            raise _renewed(self.reason)
        pending = _Pending(request, self._loop.create_future(), into, began)
        self._pending[request.id] = pending
        self.send(request)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            if request.id in self._pending:
                self._abandon(pending)
            else:  # its answer came at that moment: what that grants goes back
                self.send(Cancel(request.id))
            raise

    def _abandon(self, pending: _Pending) -> None:
        pending.into = None
        if self._assembler.payload_id == pending.request.id:
            self._assembler.drop_payload()
        else:
            self.send(Cancel(pending.request.id))

    def _new_id(self) -> int:
        id_ = self._next_id
        self._next_id = id_ % 0xFFFFFFFF + 1
        return id_

    # What CastProtocol calls.

    def frame_received(self, frame: Frame) -> None:
        match frame:
            case Hello():
                if self._hello.done():
                    raise ProtocolError("a second HELLO came")
                self._hello.set_result(frame)
            case Ready() | Location() | Paired() | Exposed() | Lent() | Met() | Shown():
                self._answered(frame)
            case Error():
                pending = self._take(frame.id)
                if not pending.answer.done():
                    pending.answer.set_exception(translate(frame))
            case _:
                raise ProtocolError(f"{type(frame).__name__} came from a server")

    def payload_buffer(self, data: Data) -> memoryview | None:
        pending = self._pending.get(data.id)
        if pending is None or not isinstance(pending.request, Read | Take):
            raise ProtocolError(f"DATA came for {data.id}, which is no read of ours")
        if data.length != pending.request.length:
            raise ProtocolError(f"{data.length} bytes came, {pending.request.length} were asked for")
        if pending.began is not None and pending.into is not None:
            pending.began()
        return pending.into

    def payload_received(self, data: Data) -> None:
        self._answered(data)

    def payload_piece_bytes(self) -> int:
        return self._pacer.piece_bytes if self._pacer else super().payload_piece_bytes()

    def payload_moved(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        if self._pacer is None or self._resume is not None:
            return
        wait_s = self._pacer.reserve(self._loop.time(), nbytes)
        if wait_s > 0 and self.reason is None:
            self.transport.pause_reading()
            self._resume = self._loop.call_later(wait_s, self._go_on)

    def link_closed(self, reason: CastError) -> None:
        if self._resume is not None:
            self._resume.cancel()
        pending, self._pending = self._pending, {}
        for request in pending.values():
            request.into = None
            if not request.answer.done():
                request.answer.set_exception(_renewed(reason))
        if not self._hello.done():
            self._hello.set_exception(_renewed(reason))
            self._hello.exception()  # nobody may be waiting
        for told in self._on_closed:
            told(reason)

    def _go_on(self) -> None:
        self._resume = None
        if self.reason is None:
            self.transport.resume_reading()

    def _answered(self, frame: Answer) -> None:
        asked = self._pending.get(frame.id)
        # Before it is taken: the closing link then tells its caller, too.
        if asked is not None and not isinstance(frame, _ANSWERS[type(asked.request)]):
            raise ProtocolError(f"{type(frame).__name__} answered a {type(asked.request).__name__}")
        pending = self._take(frame.id)
        if not pending.answer.done():
            pending.answer.set_result(frame)

    def _take(self, id_: int) -> _Pending:
        pending = self._pending.pop(id_, None)
        if pending is None:
            raise ProtocolError(f"an answer came for {id_}, which is no request of ours")
        pending.into = None
        return pending


@asynccontextmanager
async def open_link(
    url: str,
    secret: bytes,
    settings: LinkSettings,
    *,
    pacer: Pacer | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[ClientLink]:
    """An authenticated link whose server has greeted. Raises AuthError, LinkClosed, ProtocolError."""
    link = await dial(
        url,
        secret=secret,
        service=SERVICE,
        make_protocol=lambda: ClientLink(settings, pacer),
        timeout_s=settings.handshake_timeout_s,
        tls=tls,
    )
    try:
        try:
            async with asyncio.timeout(settings.handshake_timeout_s):
                await link.hello()
        except TimeoutError as error:
            raise LinkClosed(f"{url}: no greeting within {settings.handshake_timeout_s:g} s") from error
        yield link
    finally:
        await link.aclose()


def translate(error: Error) -> CastError:
    match error.code:
        case ErrorCode.REGION_GONE:
            return RegionGone(error.message)
        case ErrorCode.BAD_RANGE:
            return ProtocolError(error.message)
        case ErrorCode.CANCELLED | ErrorCode.OVERLOADED | ErrorCode.INTERNAL:
            return LinkClosed(f"the peer refused: {error.message or error.code.name.lower()}")
        case ErrorCode.NO_RDMA:
            return NotShared(f"the peer has no RDMA for this: {error.message}")
        case ErrorCode.NOT_SHARED:
            return NotShared(error.message)


def _renewed(reason: CastError) -> CastError:
    """A fresh exception of a link's reason, since each raise adds to an exception's traceback."""
    return type(reason)(str(reason))
