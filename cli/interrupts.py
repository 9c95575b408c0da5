"""Ctrl-C while a command is being imported: nothing has begun yet, so there is nothing to clean up."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
SAID = "interrupted\n"


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process with one line: an exception would come out of the import system's own
    code, in parts of which Python can only print it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as of a background job, or a program's own
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> None:
    os.write(2, SAID.encode())
    os._exit(INTERRUPTED)
