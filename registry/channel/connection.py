"""One end of the channel: frames in and out, written once a loop iteration, and the peer's keepalive."""

import asyncio
import logging
from dataclasses import dataclass
from typing import cast

from rdmacast.protocol.handshake import Service
from rdmacast.protocol.keepalive import Keepalive
from rdmacast.protocol.priority import make_urgent
from registry.channel.frames import ChannelFrameKind, FrameSplitter, pack
from registry.errors import ChannelClosed, ChannelError

logger = logging.getLogger(__name__)

SERVICE = Service("channel", 2)
_PING, _PONG = int(ChannelFrameKind.PING), int(ChannelFrameKind.PONG)
_HIGH_WATER_BYTES = 256 * 1024
_MAX_JOINED = 8  # frames in one write, so that the peer starts on them while the next are made


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """Limits of a channel. `max_calls` are open at once; a peer silent for `ping_timeout_s` is dead."""

    max_frame_bytes: int = 64 << 20
    max_calls: int = 4096
    ping_interval_s: float = 0.5
    ping_timeout_s: float = 3.0
    handshake_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.ping_interval_s < self.ping_timeout_s:
            raise ValueError("ping_interval_s must be above 0 and below ping_timeout_s")
        if self.max_frame_bytes <= 0 or self.max_calls <= 0 or self.handshake_timeout_s <= 0:
            raise ValueError("max_frame_bytes, max_calls and handshake_timeout_s must be above 0")


class ChannelConnection(asyncio.Protocol):
    """The common part of both ends. Subclasses define `frame_received` and `connection_closed`."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self.loop = asyncio.get_running_loop()
        self._splitter = FrameSplitter(settings.max_frame_bytes)
        self._keepalive = Keepalive(settings.ping_interval_s, settings.ping_timeout_s, self.loop.time())
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._out: list[bytes] = []
        self._flush_due = False
        self._writable = asyncio.Event()
        self.reason: ChannelClosed | None = None  # why it is closed
        self.is_congested = False  # `writable` would wait
        self._lost = asyncio.Event()
        self._peer = "not connected"

    def __repr__(self) -> str:
        state = "open" if self.reason is None else f"closed: {self.reason}"
        return f"{type(self).__name__}({self._peer}, {state})"

    def frame_received(self, kind: int, call: int, body: memoryview) -> None:
        """Handle a frame other than PING and PONG. May raise ChannelError, which closes the channel."""
        raise NotImplementedError

    def connection_closed(self, reason: ChannelClosed) -> None:
        """Handle the end of the channel; called once."""
        raise NotImplementedError

    @property
    def peer(self) -> str:
        return self._peer

    def write(self, frame: bytes) -> None:
        """Send a frame at the end of this loop iteration, in one write with up to seven others."""
        if self.reason is None:
            if not self._flush_due:
                self.flush_soon()
            self._out.append(frame)
            if len(self._out) == _MAX_JOINED:
                self._flush()

    def flush_soon(self) -> None:
        """Send written frames, and those of callbacks that are scheduled already, after these callbacks."""
        if not self._flush_due:
            self._flush_due = True
            self.loop.call_soon(self._run_flush)

    async def writable(self) -> None:
        """Return once the peer accepts more. Raises ChannelClosed."""
        if self.is_congested:
            await self._writable.wait()
        if self.reason is not None:
            raise ChannelClosed(str(self.reason))

    def shut(self, reason: ChannelClosed, *, flush: bool = False) -> None:
        """Close, after sending the written frames if `flush`; do nothing if closed already."""
        if self.reason is not None:
            return
        if flush:
            self._flush()
        self.reason = reason
        self._out.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            if flush:
                self._transport.close()
            else:
                self._transport.abort()
        self.resume_writing()
        self.connection_closed(reason)

    async def wait_lost(self, timeout_s: float) -> None:
        """Return once the connection is lost; it is aborted after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._lost.wait()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
            await self._lost.wait()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        make_urgent(transport.get_extra_info("socket"))
        host, port = transport.get_extra_info("peername")[:2]
        self._peer = f"{host}:{port}"
        self._timer = self.loop.call_later(self._keepalive.interval_s, self._check_peer)

    def data_received(self, data: bytes) -> None:
        closed = self.reason
        if closed is not None:
            return
        self._keepalive.on_data(self.loop.time())
        try:
            for kind, call, body in self._splitter.split(data):
                if kind == _PING:
                    self.write(pack(ChannelFrameKind.PONG, 0))
                elif kind != _PONG:
                    self.frame_received(kind, call, body)
                if self.reason is not None:
                    return
        except ChannelError as error:
            logger.warning("channel with %s: closing: %s", self._peer, error)
            self.shut(ChannelClosed(f"the peer broke the protocol: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        self.shut(ChannelClosed(f"connection lost: {exc}" if exc else "the peer closed the channel"))

    def pause_writing(self) -> None:
        self.is_congested = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.is_congested = False
        self._writable.set()

    def _run_flush(self) -> None:
        self._flush_due = False
        self._flush()

    def _flush(self) -> None:
        if self._out and self.reason is None and self._transport is not None:
            out, self._out = self._out, []
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _check_peer(self) -> None:
        if self._keepalive.is_dead(self.loop.time()):
            self.shut(ChannelClosed(f"the peer was silent for {self._settings.ping_timeout_s:g} s"))
            return
        self.write(pack(ChannelFrameKind.PING, 0))
        self._timer = self.loop.call_later(self._keepalive.interval_s, self._check_peer)
