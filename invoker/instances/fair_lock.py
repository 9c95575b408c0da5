"""A first-come-first-served lock between threads."""

import threading
from collections import deque


class FairLock:
    """A lock granted in order of arrival; threading.Lock is granted to any waiting thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __repr__(self) -> str:
        return f"<FairLock {'taken' if self._taken else 'free'}, {len(self._waiting)} wait>"

    def acquire(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            own = threading.Lock()
            own.acquire()
            self._waiting.append(own)
        own.acquire()  # released by the current owner

    def release(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
