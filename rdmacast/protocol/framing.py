"""Frames over a transport: payload is received into its buffer, and a silent peer is disconnected."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from rdmacast.errors import CastError, LinkClosed, ProtocolError
from rdmacast.protocol.keepalive import Keepalive
from rdmacast.protocol.wake_threshold import WakeThreshold
from rdmacast.protocol.wire import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    Data,
    Frame,
    Header,
    Ping,
    Pong,
    decode,
    decode_header,
    encode,
)
from rdmacast.settings import LinkSettings

logger = logging.getLogger(__name__)

_SCRATCH_BYTES = 256 * 1024
MAX_UNSENT_BYTES = 16 << 20  # of frames: a peer that leaves more unread is disconnected


class FrameAssembler:
    """A decoder of frames: `buffer` is where the next bytes go, `advance` takes their number (pure).

    After a DATA frame its owner calls `take_payload` with the buffer for its bytes; with None they are
    dropped. `advance` returns that frame a second time when the last of them has arrived. With `ahead`
    several frames may arrive at once, none of them with payload: after each the owner calls `advance` with
    0 until it returns None.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self._small = memoryview(bytearray(HEADER_BYTES + MAX_BODY_BYTES))
        self._ahead = ahead
        self._start = 0  # of the next frame in what was read ahead
        self._scratch: memoryview | None = None
        self._filled = 0
        self._header: Header | None = None
        self._payload: Data | None = None
        self._into: memoryview | None = None
        self._left = 0

    def __repr__(self) -> str:
        return f"FrameAssembler({self._payload or self._header or 'between frames'}, {self._left} left)"

    @property
    def in_payload(self) -> bool:
        return self._payload is not None

    @property
    def payload_left(self) -> int:
        """The bytes of the payload that are still to be received."""
        return self._left if self._payload is not None else 0

    @property
    def payload_id(self) -> int | None:
        """The id of the DATA frame whose payload is being received."""
        return self._payload.id if self._payload is not None else None

    def buffer(self, most: int) -> memoryview:
        """Return the buffer for the next bytes; of a payload at most `most` bytes."""
        if self._payload is None:
            if self._ahead:
                return self._small[self._filled :]
            wanted = HEADER_BYTES if self._header is None else self._header.body_bytes
            return self._small[self._filled : wanted]
        count = min(self._left, most)
        if self._into is not None:
            start = len(self._into) - self._left
            return self._into[start : start + count]
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        return self._scratch[: min(count, _SCRATCH_BYTES)]

    def advance(self, nbytes: int) -> Frame | None:
        """Count `nbytes` received; returns a frame if one is complete. Raises ProtocolError."""
        if self._payload is not None:
            return self._advance_payload(nbytes)
        self._filled += nbytes
        if self._ahead:
            return self._next_ahead()
        if self._header is None:
            if self._filled < HEADER_BYTES:
                return None
            self._header = decode_header(self._small[:HEADER_BYTES])
            self._filled = 0
        header = self._header
        if self._filled < header.body_bytes:
            return None
        body = bytes(self._small[: header.body_bytes])
        self._header = None
        self._filled = 0
        return decode(header, body)

    def _next_ahead(self) -> Frame | None:
        """Return the next frame read ahead; a partial one is moved to the front of the buffer."""
        body = self._start + HEADER_BYTES
        if self._header is None and body <= self._filled:
            self._header = decode_header(self._small[self._start : body])
        header = self._header
        if header is not None and (end := body + header.body_bytes) <= self._filled:
            self._header, self._start = None, end
            return decode(header, bytes(self._small[body:end]))
        if self._start:
            left = self._filled - self._start
            self._small[:left] = bytes(self._small[self._start : self._filled])
            self._start, self._filled = 0, left
        return None

    def take_payload(self, data: Data, into: memoryview | None) -> None:
        self._payload = data
        self._left = data.length
        self._into = into

    def drop_payload(self) -> None:
        """Drop the rest of the current payload."""
        self._into = None

    def _advance_payload(self, nbytes: int) -> Frame | None:
        self._left -= nbytes
        if self._left:
            return None
        finished, self._payload, self._into = self._payload, None, None
        return finished


class CastProtocol(asyncio.BufferedProtocol):
    """One end of a link. Subclasses handle frames; this class answers pings and closes on bad input.

    Ends that receive no payload read frames ahead (`reads_ahead`).
    """

    def __init__(self, settings: LinkSettings, *, reads_ahead: bool = False) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._reads_ahead = reads_ahead
        self._assembler = FrameAssembler(ahead=reads_ahead)
        self._keepalive = Keepalive(settings.ping_interval_s, settings.ping_timeout_s, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None  # what arrives there are frames and payload as they are
        self._wake_threshold = WakeThreshold()
        self._wake_bytes = 1
        self._drained = asyncio.Event()
        self._drained.set()
        self._in_data = False
        self._deferred: list[bytes] = []
        self._deferred_bytes = 0
        self._reason: CastError | None = None
        self._lost = asyncio.Event()

    def __repr__(self) -> str:
        state = "open" if self._reason is None else f"closed: {self._reason}"
        return f"{type(self).__name__}({state})"

    # Defined by subclasses.

    def frame_received(self, frame: Frame) -> None:
        """Handle a frame other than DATA, PING and PONG. May raise ProtocolError."""
        raise NotImplementedError

    def payload_buffer(self, data: Data) -> memoryview | None:
        """Return the buffer for a DATA frame's bytes. May raise ProtocolError."""
        raise ProtocolError("DATA was received from the wrong side")

    def payload_moved(self, nbytes: int) -> None:
        """Handle some bytes of a payload."""

    def payload_received(self, data: Data) -> None:
        """Handle the end of a payload."""

    def payload_piece_bytes(self) -> int:
        """Return how much of a payload to receive at once."""
        return 1 << 20

    def link_closed(self, reason: CastError) -> None:
        """Handle the end of the link; called once."""

    # Used by subclasses.

    @property
    def reason(self) -> CastError | None:
        """The reason for which the link was closed; None while it is open."""
        return self._reason

    @property
    def transport(self) -> asyncio.Transport:
        if self._transport is None or self._reason is not None:
            raise LinkClosed(str(self._reason or "not connected"))
        return self._transport

    def send(self, frame: Frame) -> None:
        """Send a frame without payload; during another frame's payload it waits for its end."""
        data = encode(frame)
        if self._reason is not None or self._transport is None:
            return
        if self._in_data:
            self._deferred.append(data)
            self._deferred_bytes += len(data)
        else:
            self._transport.write(data)
        # Else replies to a peer that sends requests and reads nothing would fill the memory.
        if self._deferred_bytes + self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort(LinkClosed(f"the peer left {MAX_UNSENT_BYTES} bytes unread"))

    @contextmanager
    def sending_payload(self) -> Iterator[asyncio.Transport]:
        """Write a DATA frame and its payload inside; a fault inside aborts the link."""
        transport = self.transport
        self._in_data = True
        try:
            yield transport
        except BaseException:
            self.abort(LinkClosed("a payload was cut short"))
            raise
        self._in_data = False
        deferred, self._deferred, self._deferred_bytes = self._deferred, [], 0
        if deferred and self._reason is None:
            transport.write(b"".join(deferred))

    async def drained(self) -> None:
        """Return once the transport's buffer is empty. Raises LinkClosed."""
        if not self._drained.is_set():
            await self._drained.wait()
        if self._reason is not None:
            raise LinkClosed(str(self._reason))

    def abort(self, reason: CastError) -> None:
        """Close at once; does nothing if the link is closed."""
        if self._reason is None:
            self._reason = reason
            if self._timer is not None:
                self._timer.cancel()
            # asyncio would end a lost connection a second time if bytes had waited in it.
            if self._transport is not None and not self._lost.is_set():
                self._transport.abort()
            self._assembler.drop_payload()
            self._drained.set()
            self.link_closed(reason)

    async def wait_closed(self) -> None:
        await self._lost.wait()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Any byte left over pauses us: then an empty buffer means that no memory of ours is in use. A
        # transport within TLS, which copies its input, pauses at its limit, a socket's above it.
        within_tls = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(high=1 if within_tls else 0)
        if not within_tls:
            self._socket = transport.get_extra_info("socket")
        self._timer = self._loop.call_later(self._keepalive.interval_s, self._check_peer)

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reason is not None:
            return memoryview(bytearray(4096))  # what a closed link still receives is dropped
        return self._assembler.buffer(self.payload_piece_bytes())

    def buffer_updated(self, nbytes: int) -> None:
        if self._reason is not None:
            return
        now_s = self._loop.time()
        self._keepalive.on_data(now_s)
        in_payload = self._assembler.in_payload
        try:
            frame = self._assembler.advance(nbytes)
            if in_payload:
                enough = self._wake_threshold.on_data(nbytes, self._assembler.payload_left, now_s)
                self._wake_at(min(enough, self.payload_piece_bytes()))
                self.payload_moved(nbytes)
            while frame is not None and self._reason is None:
                self._dispatch(frame, in_payload)
                more = self._reads_ahead and self._reason is None
                frame = self._assembler.advance(0) if more else None
        except ProtocolError as error:
            logger.warning("closing a link: %s", error)
            self.abort(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        self.abort(LinkClosed(f"connection lost: {exc}" if exc else "the peer closed the connection"))

    def _dispatch(self, frame: Frame, payload_ended: bool) -> None:
        match frame:
            case Data() if payload_ended:
                self.payload_received(frame)
            case Data():
                self._assembler.take_payload(frame, self.payload_buffer(frame))
                self._wake_threshold.on_payload(self._loop.time())
            case Ping():
                self.send(Pong())
            case Pong():
                pass
            case _:
                self.frame_received(frame)

    def _wake_at(self, nbytes: int) -> None:
        """Have the kernel wake this process once so many bytes are there."""
        if self._socket is not None and nbytes != self._wake_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wake_bytes = nbytes

    def _check_peer(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._wake_at(1)  # slow data is a sign of life, too
        if self._keepalive.is_dead(self._loop.time()):
            self.abort(LinkClosed(f"the peer was silent for {self._settings.ping_timeout_s:g} s"))
            return
        if not self._in_data:  # else the payload is the sign of life
            self.send(Ping())
        if self._reason is None:
            self._timer = self._loop.call_later(self._keepalive.interval_s, self._check_peer)
