"""Processes whose parent died and which the kernel gave to this one: waited for, ended, or reaped."""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection, Iterator

REAP_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def orphans_taken() -> Iterator[None]:
    """Meanwhile, be the parent of whatever below this process loses its own."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


class Orphan:
    """A child that this process did not start. Its descriptor keeps its number from meaning another."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if it has ended and is gone."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def __repr__(self) -> str:
        return f"<Orphan pid={self.pid}>"

    async def ended(self) -> int | None:
        """Return once it has ended: its exit code, or minus the signal; None if nobody knows."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop.add_reader(self._fd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(self._fd)
        return exit_code(self.pid)

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        os.close(self._fd)


async def reap_strays(known: Callable[[], Collection[int]], every_s: float = REAP_S) -> None:
    """Until cancelled, wait for ended children that nobody else does: what a dead child had started."""
    seen = 0
    while True:
        await asyncio.sleep(every_s)
        seen = reap(known(), seen)


def reap(known: Collection[int], seen: int) -> int:
    """Reap what has ended and is not known; returns which one to give as `seen` the next time.

    Only what was `seen` before: a process that is just being started gets the time to be known.
    """
    try:
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid in known or found.si_pid != seen:
                return found.si_pid
            os.waitpid(found.si_pid, os.WNOHANG)
    except ChildProcessError:  # it has no children
        pass
    return 0


def exit_code(pid: int) -> int | None:
    """The exit code of an ended child, or minus the signal; None if somebody else was told."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG)[1])
    except ChildProcessError:
        return None
