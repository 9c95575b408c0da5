"""Ctrl-C while a command is imported: there is nothing to clean up yet."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
MESSAGE = "interrupted\n"


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process on Ctrl-C with one line while the block runs.

    An exception would be raised inside the import system, parts of which can only print it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored in a background job, or a handler of the caller
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> None:
    os.write(2, MESSAGE.encode())
    os._exit(INTERRUPTED)
