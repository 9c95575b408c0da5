"""The guard of a handler: its parent, outside of its restrictions, which holds it to its limits and ends it.

    node ── guard ── handler ── whatever the handler starts

A handler and all that it starts are one process group, which the handler's filter does not let it leave.
The guard kills that group when the handler ends, when the group exceeds its limits, or when the node stops it
(SIGTERM) or dies; it ends as the handler did. A program may get some time to end by itself first (SIGTERM).
The guard reads what the group uses a few times a second, so several processes together can exceed a limit by
what they get within MAX_INTERVAL_S.
"""

import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from invoker.handlers import confine
from invoker.handlers.landlock import pin_proc
from invoker.handlers.usage import GroupUsage, group_usage, memory_bytes_of

# How a guard ends if the group exceeded a limit.
MEMORY_STATUS, TASKS_STATUS, CPU_STATUS = 201, 202, 203
RENEW = signal.SIGUSR1  # from the node: allow limits.cpu from now on

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 0.5  # while the group does nothing

_STOP = signal.SIGTERM
_SIGNALS = (_STOP, RENEW, signal.SIGCHLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """The limits of a process group in all; `cpu_s` is processor time until it is renewed."""

    memory_bytes: int
    tasks: int
    cpu_s: float = math.inf


def fork_guarded(limits: GroupLimits, *, node: int, socket: int | None = None, end_s: float = 0.0) -> None:
    """Fork. Returns in the handler's process, the leader of a new process group; the guard never returns.

    The guard closes its copy of the handler's `socket`. Within its limits the group has `end_s` to end by
    itself. Call it before the first thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    guard = os.getpid()
    gate, opener = os.pipe()
    handler = os.fork()
    if handler:
        os.close(gate)
        if socket is not None:
            os.close(socket)
        _Guard(handler, limits, end_s).run(node, opener)
    os.setsid()
    confine.die_with(guard)
    os.close(opener)
    os.read(gate, 1)
    os.close(gate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


class _Guard:
    """The loop of the guard."""

    def __init__(self, handler: int, limits: GroupLimits, end_s: float) -> None:
        self._handler = handler
        self._limits = limits
        self._end_s = end_s
        # The interpreter's own memory is not the user's.
        self._memory_bytes = limits.memory_bytes + memory_bytes_of(os.getpid())
        self._reaped_s = 0.0  # processor time of orphans that have ended
        self._used = GroupUsage()
        self._allowed_s: float | None = None  # of processor time; None: from the next reading on

    def run(self, node: int, opener: int) -> NoReturn:
        confine.die_with(node, _STOP)
        confine.adopt_orphans()
        confine.hide_memory()  # and dump no core if it ends by the handler's signal
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        pin_proc(self._handler)
        os.close(opener)
        exceeded = self._watch()
        if exceeded is None and self._end_s:
            self._await_end()
        self._kill()
        status = self._wait_for_all()
        _end(exceeded or status)

    def _watch(self) -> int | None:
        """Return once the group must end: the status for a limit that it exceeded, if it is for that."""
        interval_s = MIN_INTERVAL_S
        due_s = time.monotonic() + interval_s  # not while the handler needs the processor to load
        while True:
            info = signal.sigtimedwait(_SIGNALS, max(0.0, due_s - time.monotonic()))
            match info.si_signo if info else None:
                case signal.SIGCHLD:
                    if self._reap():
                        return None
                case signal.SIGTERM:
                    return None
                case signal.SIGUSR1:
                    self._allowed_s = None
                    interval_s = MIN_INTERVAL_S
                    due_s = min(due_s, time.monotonic() + interval_s)
                case _:
                    before = self._used
                    if (status := self._exceeded()) is not None:
                        return status
                    idle = self._used == before
                    interval_s = min(2 * interval_s, MAX_INTERVAL_S) if idle else MIN_INTERVAL_S
                    due_s = time.monotonic() + interval_s

    def _exceeded(self) -> int | None:
        """Read what the group uses; return the status for a limit that it exceeds."""
        limits = self._limits
        used = group_usage(self._handler, limits.tasks)
        before, self._used = self._used, used
        cpu_s = used.cpu_s + self._reaped_s
        if self._allowed_s is None:
            self._allowed_s = cpu_s + limits.cpu_s
        if used.tasks > limits.tasks:
            return TASKS_STATUS
        # Twice: between its start and its exec, a child has its parent's memory.
        if min(used.memory_bytes, before.memory_bytes) > self._memory_bytes:
            return MEMORY_STATUS
        return CPU_STATUS if cpu_s > self._allowed_s else None

    def _reap(self) -> bool:
        """Wait for the orphans that have ended; return whether the handler has."""
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return False
            if ended.si_pid == self._handler:
                return True  # not waited for, so that the group's number stays its own
            _, _, use = os.wait4(ended.si_pid, 0)
            self._reaped_s += use.ru_utime + use.ru_stime

    def _await_end(self) -> None:
        """Have the group end by itself, which removes what it has in shared memory."""
        with suppress(ProcessLookupError):
            os.killpg(self._handler, _STOP)
        deadline_s = time.monotonic() + self._end_s
        while time.monotonic() < deadline_s and group_usage(self._handler, self._limits.tasks).memory_bytes:
            signal.sigtimedwait((signal.SIGCHLD,), MIN_INTERVAL_S)
            self._reap()

    def _kill(self) -> None:
        """Kill the group: one step of the kernel, which a process that forks cannot outrun."""
        os.kill(self._handler, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it has not made its group yet
            os.killpg(self._handler, signal.SIGKILL)

    def _wait_for_all(self) -> int:
        """Wait for the handler and all that it started; return how the handler ended."""
        status = 0
        with suppress(ChildProcessError):
            while True:
                pid, raw = os.waitpid(-1, 0)
                if pid == self._handler:
                    status = os.waitstatus_to_exitcode(raw)
        return status


def _end(status: int) -> NoReturn:
    """End as the handler did: with its exit code, or by its signal."""
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler to set
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-status,))
        os.kill(os.getpid(), -status)
    os._exit(status)
