"""Taking turns between threads, first come first served."""

import threading
from collections import deque


class Turns:
    """A lock that goes to whoever has waited longest; a plain one goes to whoever is awake."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __repr__(self) -> str:
        return f"<Turns {'taken' if self._taken else 'free'}, {len(self._waiting)} wait>"

    def take(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()  # given by whoever has it now

    def give(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
