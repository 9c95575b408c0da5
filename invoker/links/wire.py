"""The two links of a stage, to the previous stage and to the next one, used by one thread."""

import os
import select
import socket
import ssl
import threading
from collections import deque
from typing import Generic

from invoker.links.framing import FrameReader, LinkFrame, LinkLost, MessageT

_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, InterruptedError)


class StageWire(Generic[MessageT]):
    """Non-blocking frames from `before` and to `behind`; owns both sockets.

    Only `wait` and `drain` block, until `wake`, which any thread may call. Buffers passed to `send` must not
    change until they are sent. Methods raise LinkLost if a link is lost.
    """

    def __init__(self, before: socket.socket, behind: socket.socket, reader: FrameReader[MessageT]) -> None:
        self._before, self._behind = before, behind
        self._reader = reader
        self._unsent: deque[memoryview] = deque()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._wakeup_fd, select.POLLIN)
        self._poll.register(before.fileno(), select.POLLIN)
        self._poll.register(behind.fileno(), select.POLLRDHUP)
        self._polls_output = False
        self._output_poll = select.poll()  # for `drain`
        self._output_poll.register(self._wakeup_fd, select.POLLIN)
        self._output_poll.register(behind.fileno(), select.POLLRDHUP | select.POLLOUT)
        for one in (before, behind):
            one.setblocking(False)

    def __repr__(self) -> str:
        return f"<StageWire {sum(map(len, self._unsent))} bytes to send>"

    @property
    def is_sending(self) -> bool:
        """Return whether there are unsent bytes, which `receive`, `wait` and `drain` continue to send."""
        return bool(self._unsent)

    def receive(self) -> LinkFrame[MessageT] | None:
        """Return the next frame if it is complete; its payload may be overwritten by the next one."""
        self._flush()
        frame = self._reader.advance(0)
        while frame is None:
            try:
                count = self._before.recv_into(self._reader.buffer())
            except _LATER:
                return None
            except OSError as error:
                raise LinkLost(
                    f"the link from the previous stage broke: {error.strerror or error}"
                ) from error
            if not count:
                raise LinkLost("the previous stage closed its link")
            frame = self._reader.advance(count)
        return frame

    def send(self, *parts: memoryview) -> None:
        """Send buffers in order, without copying them."""
        self._unsent.extend(part for part in parts if len(part))
        self._flush()

    def wait(self) -> None:
        """Return once data may be available, all is sent, or `wake` was called."""
        while True:
            was_sending = self.is_sending
            self._flush()
            polls_output = self.is_sending
            if was_sending and not polls_output:
                return
            if polls_output is not self._polls_output:
                self._polls_output = polls_output
                extra = select.POLLOUT if polls_output else 0
                self._poll.modify(self._behind.fileno(), select.POLLRDHUP | extra)
            events = dict(self._poll.poll())
            if self._wakeup_fd in events:
                os.eventfd_read(self._wakeup_fd)
                return
            if events.get(self._behind.fileno(), 0) & (_GONE | select.POLLRDHUP):
                raise LinkLost("the next stage closed its link")
            if self._before.fileno() in events:
                return

    def drain(self) -> None:
        """Return once all is sent, or `wake` was called.

        At least one stage of a ring must not call this, but receive instead.
        """
        while self.is_sending:
            events = dict(self._output_poll.poll())
            if self._wakeup_fd in events:
                os.eventfd_read(self._wakeup_fd)
                return
            if events.get(self._behind.fileno(), 0) & (_GONE | select.POLLRDHUP):
                raise LinkLost("the next stage closed its link")
            self._flush()

    def wake(self) -> None:
        """End the current or the next `wait`. Thread-safe."""
        with self._wakeup_lock:
            if self._wakeup_fd >= 0:
                os.eventfd_write(self._wakeup_fd, 1)

    def close(self) -> None:
        """Close both sockets; called by the thread that uses the wire. Idempotent."""
        with self._wakeup_lock:
            wakeup_fd, self._wakeup_fd = self._wakeup_fd, -1
        if wakeup_fd >= 0:
            os.close(wakeup_fd)
            self._before.close()
            self._behind.close()
        self._unsent.clear()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._send_some()
            except _LATER:
                return
            except OSError as error:
                raise LinkLost(f"the link to the next stage broke: {error.strerror or error}") from error
            while sent and self._unsent:
                part = self._unsent.popleft()
                if sent < len(part):
                    self._unsent.appendleft(part[sent:])
                sent = max(0, sent - len(part))

    def _send_some(self) -> int:
        if isinstance(self._behind, ssl.SSLSocket):
            return self._behind.send(self._unsent[0])
        return self._behind.sendmsg(list(self._unsent)[:64])
