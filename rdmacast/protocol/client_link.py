"""The reading end of a link: requests are pipelined, and payload is received into the caller's buffer."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from rdmacast.errors import CastError, LinkClosed, NotShared, ProtocolError, RegionGone
from rdmacast.pacer import Pacer
from rdmacast.plan_slot import PlanSlot
from rdmacast.protocol.connection import dial
from rdmacast.protocol.frames import (
    Cancel,
    Data,
    Error,
    ErrorCode,
    Frame,
    Greeting,
    Read,
    SlotRead,
    TransportReply,
    TransportRequest,
)
from rdmacast.protocol.framing import CastProtocol
from rdmacast.protocol.handshake import Secret
from rdmacast.protocol.wire import SERVICE
from rdmacast.settings import LinkSettings
from rdmacast.transport import OnStart

_Request = Read | TransportRequest
_Reply = Data | TransportReply


@dataclass(slots=True, eq=False)
class _PendingReply:
    """A request without a reply. `into` is None when its caller was cancelled."""

    request: _Request
    reply: "asyncio.Future[_Reply]"
    into: memoryview | None
    on_start: OnStart | None = None

    @property
    def reply_type(self) -> type[_Reply]:
        return Data if isinstance(self.request, Read) else TransportReply


class ClientLink(CastProtocol):
    """A connection for requests to one peer. The reply to a cancelled request is received and dropped.

    With `reads_ahead` it is for transport requests only, whose replies are then received in one call.
    """

    def __init__(self, settings: LinkSettings, pacer: Pacer | None = None, reads_ahead: bool = False) -> None:
        super().__init__(settings, reads_ahead=reads_ahead)
        self._pacer = pacer
        self._greeting: asyncio.Future[Greeting] = self._loop.create_future()
        self._pending: dict[int, _PendingReply] = {}
        self._next_id = 1
        self._resume_timer: asyncio.TimerHandle | None = None
        self._on_closed: list[Callable[[CastError], None]] = []
        self.received_bytes = 0  # of payloads

    @property
    def is_idle(self) -> bool:
        """Whether the link is open and has no request without a reply."""
        return self.reason is None and not self._pending

    async def greeting(self) -> Greeting:
        """Return the server's greeting. Raises LinkClosed or ProtocolError."""
        return await asyncio.shield(self._greeting)

    async def read(
        self,
        region: str,
        offset: int,
        into: memoryview,
        on_start: OnStart | None = None,
        slot: PlanSlot | None = None,
    ) -> None:
        """Fill `into` (at most the server's longest read) from the region; `on_start` as in Link."""
        range_ = self._new_id(), region, offset, len(into)
        await self._request(Read(*range_) if slot is None else SlotRead(*range_, slot), into, on_start)

    def connect(self, kind: str, payload: bytes = b"") -> AbstractAsyncContextManager[bytes]:
        """Send the transport's connect request; inside, what the reply grants is valid. Raises NotShared."""
        return self._granted(TransportRequest(self._new_id(), kind, payload=payload))

    def export(self, kind: str, region: str, offset: int, nbytes: int) -> AbstractAsyncContextManager[bytes]:
        """Have a range exported by the transport; inside, it is present and may be read.

        Waits while the range is not present yet. Raises NotShared and RegionGone.
        """
        return self._granted(TransportRequest(self._new_id(), kind, region, offset, nbytes))

    def on_closed(self, callback: Callable[[CastError], None]) -> None:
        """Call `callback` when the link closes; at once if it has."""
        self._on_closed.append(callback)
        if self.reason is not None:
            callback(self.reason)

    async def aclose(self) -> None:
        """Close the connection and wait for its end."""
        self.abort(LinkClosed("the link was closed"))
        await self.wait_closed()

    @asynccontextmanager
    async def _granted(self, request: TransportRequest) -> AsyncIterator[bytes]:
        reply = await self._request(request, None)
        assert isinstance(reply, TransportReply)
        try:
            yield reply.payload
        finally:
            self.send(Cancel(request.id))

    async def _request(
        self, request: _Request, into: memoryview | None, on_start: OnStart | None = None
    ) -> _Reply:
        if self.reason is not None:
            raise _renewed(self.reason)
        pending = _PendingReply(request, self._loop.create_future(), into, on_start)
        self._pending[request.id] = pending
        self.send(request)
        try:
            return await pending.reply
        except asyncio.CancelledError:
            if request.id in self._pending:
                self._abandon(pending)
            else:  # the reply was received at that moment: what it grants is released
                self.send(Cancel(request.id))
            raise

    def _abandon(self, pending: _PendingReply) -> None:
        pending.into = None
        if self._assembler.payload_id == pending.request.id:
            self._assembler.drop_payload()
        else:
            self.send(Cancel(pending.request.id))

    def _new_id(self) -> int:
        id_ = self._next_id
        self._next_id = id_ % 0xFFFFFFFF + 1
        return id_

    # Called by CastProtocol.

    def frame_received(self, frame: Frame) -> None:
        match frame:
            case Greeting():
                if self._greeting.done():
                    raise ProtocolError("a second GREETING was received")
                self._greeting.set_result(frame)
            case TransportReply():
                self._on_reply(frame)
            case Error():
                pending = self._pop(frame.id)
                if not pending.reply.done():
                    pending.reply.set_exception(translate(frame))
            case _:
                raise ProtocolError(f"{type(frame).__name__} was received from a server")

    def payload_buffer(self, data: Data) -> memoryview | None:
        pending = self._pending.get(data.id)
        if pending is None or not isinstance(pending.request, Read):
            raise ProtocolError(f"DATA for {data.id}, which is no pending read")
        if data.length != pending.request.length:
            raise ProtocolError(f"DATA of {data.length} bytes for a read of {pending.request.length}")
        if pending.on_start is not None and pending.into is not None:
            pending.on_start()
        return pending.into

    def payload_received(self, data: Data) -> None:
        self._on_reply(data)

    def payload_piece_bytes(self) -> int:
        return self._pacer.piece_bytes if self._pacer else super().payload_piece_bytes()

    def payload_moved(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        if self._pacer is None or self._resume_timer is not None:
            return
        wait_s = self._pacer.reserve(self._loop.time(), nbytes)
        if wait_s > 0 and self.reason is None:
            self.transport.pause_reading()
            self._resume_timer = self._loop.call_later(wait_s, self._resume)

    def link_closed(self, reason: CastError) -> None:
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        abandoned, self._pending = self._pending, {}
        for pending in abandoned.values():
            pending.into = None
            if not pending.reply.done():
                pending.reply.set_exception(_renewed(reason))
        if not self._greeting.done():
            self._greeting.set_exception(_renewed(reason))
            self._greeting.exception()  # marked as retrieved: there may be no waiter
        for callback in self._on_closed:
            callback(reason)

    def _resume(self) -> None:
        self._resume_timer = None
        if self.reason is None:
            self.transport.resume_reading()

    def _on_reply(self, frame: _Reply) -> None:
        expected = self._pending.get(frame.id)
        # Before it is removed: the link that closes then fails this request, too.
        if expected is not None and not isinstance(frame, expected.reply_type):
            raise ProtocolError(f"{type(frame).__name__} in reply to a {type(expected.request).__name__}")
        pending = self._pop(frame.id)
        if not pending.reply.done():
            pending.reply.set_result(frame)

    def _pop(self, id_: int) -> _PendingReply:
        pending = self._pending.pop(id_, None)
        if pending is None:
            raise ProtocolError(f"a reply to {id_}, which is no pending request")
        pending.into = None
        return pending


@asynccontextmanager
async def open_link(
    url: str,
    secret: Secret,
    settings: LinkSettings,
    *,
    pacer: Pacer | None = None,
    tls: ssl.SSLContext | None = None,
    reads_ahead: bool = False,
) -> AsyncIterator[ClientLink]:
    """Open an authenticated link and wait for the greeting.

    Raises PeerAuthError, LinkClosed, ProtocolError.
    """
    link = await dial(
        url,
        secret=secret,
        service=SERVICE,
        make_protocol=lambda: ClientLink(settings, pacer, reads_ahead),
        timeout_s=settings.handshake_timeout_s,
        tls=tls,
    )
    try:
        try:
            async with asyncio.timeout(settings.handshake_timeout_s):
                await link.greeting()
        except TimeoutError as error:
            raise LinkClosed(f"{url}: no greeting within {settings.handshake_timeout_s:g} s") from error
        yield link
    finally:
        await link.aclose()


def translate(error: Error) -> CastError:
    """Return the exception for an ERROR frame."""
    match error.code:
        case ErrorCode.REGION_GONE:
            return RegionGone(error.message)
        case ErrorCode.BAD_REQUEST:
            return ProtocolError(error.message)
        case ErrorCode.CANCELLED | ErrorCode.OVERLOADED | ErrorCode.INTERNAL:
            return LinkClosed(f"the peer refused: {error.message or error.code.name.lower()}")
        case ErrorCode.NOT_SHARED:
            return NotShared(error.message)


def _renewed(reason: CastError) -> CastError:
    """Return a fresh exception of a link's reason, since each raise adds to an exception's traceback."""
    return type(reason)(str(reason))
