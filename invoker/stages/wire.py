"""A stage's two links, to the stage before it and to the one behind, for the one thread that serves both."""

import os
import select
import socket
import ssl
import threading
from collections import deque
from typing import Generic, Protocol, TypeVar

from invoker.stages.frames import LinkLost

_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, InterruptedError)


Word = TypeVar("Word")
Told = TypeVar("Told", covariant=True)


class Reader(Protocol[Told]):
    """Puts what comes together from bytes: see FrameReader."""

    def buffer(self) -> memoryview: ...

    def advance(self, count: int) -> Told | None:
        """So many bytes have come: the first thing that is whole. With 0, whether there is another one."""
        ...


class Wire(Generic[Word]):
    """Frames in from `before` and out to `behind`, without waiting; only `wait` and `send_out` wait, or until
    `wake`, which may be called from any thread. What has been sent is kept until it is out.

    Both sockets belong to the wire. Methods raise LinkLost where one is gone.
    """

    def __init__(self, before: socket.socket, behind: socket.socket, reader: Reader[Word]) -> None:
        self._before, self._behind = before, behind
        self._reader = reader
        self._left: deque[memoryview] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ringing = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._poll.register(before.fileno(), select.POLLIN)
        self._poll.register(behind.fileno(), select.POLLRDHUP)
        self._hurries = False
        self._poll_out = select.poll()  # for who takes nothing until all is out
        self._poll_out.register(self._bell, select.POLLIN)
        self._poll_out.register(behind.fileno(), select.POLLRDHUP | select.POLLOUT)
        for one in (before, behind):
            one.setblocking(False)

    def __repr__(self) -> str:
        return f"<Wire with {sum(map(len, self._left))} bytes to send>"

    @property
    def is_sending(self) -> bool:
        """Whether the socket did not take all yet: it takes the rest while somebody waits here."""
        return bool(self._left)

    def receive(self) -> Word | None:
        """The next frame, if all of it has come. Its rows lie in a buffer that the next one overwrites."""
        self._flush()
        frame = self._reader.advance(0)
        while frame is None:
            try:
                count = self._before.recv_into(self._reader.buffer())
            except _LATER:
                return None
            except OSError as error:
                raise LinkLost(f"the link from the stage before broke: {error.strerror or error}") from error
            if not count:
                raise LinkLost("the stage before has closed its link")
            frame = self._reader.advance(count)
        return frame

    def push(self, *parts: memoryview) -> None:
        """Send these one after the other, from where they lie."""
        self._left.extend(part for part in parts if len(part))
        self._flush()

    def wait(self) -> None:
        """Return once something may have come, what was left is out, or somebody has woken us."""
        while True:
            was_sending = self.is_sending
            self._flush()
            hurries = self.is_sending
            if was_sending and not hurries:
                return
            if hurries is not self._hurries:
                self._hurries = hurries
                extra = select.POLLOUT if hurries else 0
                self._poll.modify(self._behind.fileno(), select.POLLRDHUP | extra)
            came = dict(self._poll.poll())
            if self._bell in came:
                os.eventfd_read(self._bell)
                return
            if came.get(self._behind.fileno(), 0) & (_GONE | select.POLLRDHUP):
                raise LinkLost("the stage behind has closed its link")
            if self._before.fileno() in came:
                return

    def send_out(self) -> None:
        """Return once all is out, or somebody has woken us. Of a ring at least one must never call this, but
        take what the others send."""
        while self.is_sending:
            came = dict(self._poll_out.poll())
            if self._bell in came:
                os.eventfd_read(self._bell)
                return
            if came.get(self._behind.fileno(), 0) & (_GONE | select.POLLRDHUP):
                raise LinkLost("the stage behind has closed its link")
            self._flush()

    def wake(self) -> None:
        """End a `wait`, now or the next one."""
        with self._ringing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Idempotent; by the thread that uses the wire."""
        with self._ringing:
            bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
            self._before.close()
            self._behind.close()
        self._left.clear()

    def _flush(self) -> None:
        while self._left:
            try:
                sent = self._send_some()
            except _LATER:
                return
            except OSError as error:
                raise LinkLost(f"the link to the stage behind broke: {error.strerror or error}") from error
            while sent and self._left:
                part = self._left.popleft()
                if sent < len(part):
                    self._left.appendleft(part[sent:])
                sent = max(0, sent - len(part))

    def _send_some(self) -> int:
        if isinstance(self._behind, ssl.SSLSocket):
            return self._behind.send(self._left[0])
        return self._behind.sendmsg(list(self._left)[:64])
