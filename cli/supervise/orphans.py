"""Orphaned processes that this one adopts: it waits for them, ends them or reaps them."""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection, Iterator

REAP_S = 2.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def signal_at_parents_end(number: signal.Signals) -> None:
    """Request a signal for when the parent of this process ends, by whatever cause."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def orphans_taken() -> Iterator[None]:
    """Adopt descendants whose parent dies while the block runs."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


class Orphan:
    """A child that this process did not start, held by a descriptor so that its pid is not reused."""

    def __init__(self, pid: int) -> None:
        """Open the process. Raises ProcessLookupError if it has ended and was reaped."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def __repr__(self) -> str:
        return f"<Orphan pid={self.pid}>"

    async def ended(self) -> int | None:
        """Wait for its end; return its exit code, or minus the signal, None if unknown."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop.add_reader(self._fd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(self._fd)
        return exit_code(self.pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; no effect once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


async def reap_strays(known: Callable[[], Collection[int]], every_s: float = REAP_S) -> None:
    """Reap ended children that no other code waits for, until cancelled."""
    seen = 0
    while True:
        await asyncio.sleep(every_s)
        seen = reap(known(), seen)


def reap(known: Collection[int], seen: int) -> int:
    """Reap children that have ended and are not known; return the `seen` of the next call.

    Only a child `seen` before is reaped: one that is just being started has time to become known.
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
    """Return the exit code of an ended child, or minus the signal; None if it was reaped elsewhere."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG)[1])
    except ChildProcessError:
        return None
