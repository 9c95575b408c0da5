"""Concurrent reads by several callers over one queue pair (or another read port)."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rdmacast.aio.shielded import join_shielded
from rdmacast.errors import DeviceError, LinkClosed
from rdmacast.transports.verbs.address import RemoteMemory
from rdmacast.transports.verbs.device import LocalMemory, ReadPort

MESSAGE_BYTES = 4 << 20  # of one READ: long enough that posting it costs nothing, short enough to interleave
ABANDONED_S = 15.0  # how long a cancelled read may hold its memory
POLL_S = 0.0005  # a full queue lasts longer than this on any link, so the link is never idle for it


@dataclass(slots=True, eq=False)
class _Reading:
    """One caller's read: READs of `[0, posted)` were posted, and `pending` of them have not ended."""

    local: LocalMemory
    remote: RemoteMemory
    nbytes: int
    ended: "asyncio.Future[None]"
    posted: int = 0
    pending: int = 0
    stopped: bool = False

    @property
    def is_posted(self) -> bool:
        return self.stopped or self.posted == self.nbytes


class ReadQueue:
    """A queue of reads that owns a connected read port; `failed` is called once, with the reason."""

    def __init__(
        self,
        pair: ReadPort,
        depth: int,
        message_bytes: int,
        failed: Callable[[LinkClosed], None],
        abandoned_s: float = ABANDONED_S,
    ) -> None:
        self._pair = pair
        self._depth = depth
        self._message_bytes = min(message_bytes, MESSAGE_BYTES)
        self._failed = failed
        self._abandoned_s = abandoned_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Reading] = deque()  # not yet posted to their ends
        self._pending: dict[int, tuple[_Reading, int]] = {}
        self._next_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._reason: LinkClosed | None = None
        self.unsafe: DeviceError | None = None  # the port refused to close: its READs may still land
        self.received_bytes = 0

    def __repr__(self) -> str:
        state = "open" if self._reason is None else f"closed: {self._reason}"
        return f"ReadQueue({len(self._pending)} under way, {state})"

    async def read(self, local: LocalMemory, remote: RemoteMemory, nbytes: int) -> None:
        """Read; when this returns or raises, cancelled too, nothing is written to `local` any more.

        Unless the queue is `unsafe`: then `local` is to be withdrawn. Raises LinkClosed.
        """
        if self._reason is not None:
            raise LinkClosed(str(self._reason))
        reading = _Reading(local, remote, nbytes, self._loop.create_future())
        self._waiting.append(reading)
        self._advance()
        try:
            await asyncio.wait({reading.ended})
        except asyncio.CancelledError:
            # The device cannot take a READ back: those under way end first, or the queue pair does.
            reading.stopped = True
            self._settle(reading)
            late = self._loop.call_later(
                self._abandoned_s,
                self._fail,
                f"a cancelled read did not end in {self._abandoned_s:g} s",
            )
            try:
                await join_shielded([reading.ended])
            finally:
                late.cancel()
            raise
        if self._reason is not None:
            raise LinkClosed(str(self._reason))

    def close(self, reason: LinkClosed) -> None:
        """End all reads; on return nothing of them is written any more, unless `unsafe`. Idempotent."""
        if self._reason is not None:
            return
        self._reason = reason
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._pair.close()
        except DeviceError as error:
            self.unsafe = error
        pending, self._pending = self._pending, {}
        waiting, self._waiting = self._waiting, deque()
        for reading in [*waiting, *(reading for reading, _ in pending.values())]:
            if not reading.ended.done():
                reading.ended.set_result(None)

    def _advance(self) -> None:
        try:
            self._post()
        except DeviceError as error:
            self._fail(str(error))
            return
        if self._pending and self._timer is None:
            self._timer = self._loop.call_later(POLL_S, self._poll)

    def _post(self) -> None:
        while self._waiting and len(self._pending) < self._depth:
            reading = self._waiting[0]
            if reading.is_posted:
                self._waiting.popleft()
                continue
            start, count = reading.posted, min(self._message_bytes, reading.nbytes - reading.posted)
            self._pair.read(
                self._next_id,
                LocalMemory(reading.local.address + start, reading.local.lkey),
                RemoteMemory(reading.remote.address + start, reading.remote.rkey),
                count,
            )
            self._pending[self._next_id] = reading, count
            self._next_id += 1
            reading.posted += count
            reading.pending += 1

    def _poll(self) -> None:
        self._timer = None
        try:
            completions = self._pair.poll()
        except DeviceError as error:
            self._fail(str(error))
            return
        for completion in completions:
            reading, count = self._pending.pop(completion.id)
            if completion.fault is not None:
                # With those of `completion`, or its caller would wait for ever.
                self._pending[completion.id] = reading, count
                self._fail(completion.fault)
                return
            reading.pending -= 1
            self.received_bytes += count
            self._settle(reading)
        self._advance()

    def _settle(self, reading: _Reading) -> None:
        if reading.is_posted and not reading.pending and not reading.ended.done():
            reading.ended.set_result(None)

    def _fail(self, fault: str) -> None:
        if self._reason is None:
            reason = LinkClosed(f"reading failed: {fault}")
            self.close(reason)
            self._failed(reason)
