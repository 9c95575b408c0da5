"""Fork invokers or gateways from one process (`python -m cli.supervise.zygote PROGRAM`).

It has imported what they need, so that each starts in milliseconds, even on a busy machine.

    stdin   {"spawn": {"id": "n0", "argv": ["--redis-url", ...], "log": "/path"}}   one JSON object a line
    stdout  {"spawned": "n0", "pid": 12}
            {"exited": "n0", "pid": 12, "code": 0}   or   {"exited": "n0", "pid": 12, "signal": 9}
            {"error": "...", "id": "n0"}             a command that failed

At the end of stdin, or on SIGTERM or SIGINT, the children receive SIGTERM, after STOP_S SIGKILL, and the
zygote exits. If the zygote dies, its children continue if its own parent adopts orphans
(PR_SET_CHILD_SUBREAPER); else, or when that parent dies too, they end as on SIGTERM.

The zygote starts no thread and touches no accelerator: neither survives a fork (OpenBLAS, which numpy
brings, restarts its pool by itself).
"""

import gc
import importlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from setproctitle import setproctitle

from cli.supervise.orphans import signal_at_parents_end

STOP_S = 35.0  # longer than the --grace of nodes for requests in flight (30 s by default)
_ORPHANED = (
    signal.SIGUSR1
)  # sent to a child when its parent dies: the zygote, then the process that adopted it
_READ_BYTES = 65536
_ENDING = frozenset((signal.SIGTERM, signal.SIGINT))
_PROGRAMS = ("gateway", "invoker")  # each has a `main(argv)` in its `__main__`

Program = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """A command: run the program with `argv`, its output appended to the file `log`."""

    id: str
    argv: tuple[str, ...]
    log: str


def parse_command(line: bytes) -> Spawn:
    """Parse the command in a line. Raises ValueError."""
    command = json.loads(line)
    spawn = command.get("spawn") if isinstance(command, dict) else None
    if not isinstance(spawn, dict) or set(spawn) != {"id", "argv", "log"}:
        raise ValueError('expected {"spawn": {"id": ..., "argv": [...], "log": ...}}')
    argv = spawn["argv"]
    texts = [spawn["id"], spawn["log"], *(argv if isinstance(argv, list) else [None])]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("id and log must be strings, argv a list of strings")
    return Spawn(id=spawn["id"], argv=tuple(argv), log=spawn["log"])


@dataclass(slots=True)
class Zygote:
    """The loop of the parent: commands from stdin, deaths of children from SIGCHLD."""

    wake_r: int
    wake_w: int
    supervisor: int
    name: str
    program: Program
    fork: Callable[[], int] = os.fork
    children: dict[int, str] = field(default_factory=dict)
    pending: bytes = b""
    stopping: bool = False

    def run(self) -> None:
        """Fork on command until the end of stdin, then stop the children."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self.wake_r, select.POLLIN)
        while not self.stopping:
            for fd, _ in poll.poll():
                if fd == self.wake_r:
                    self._signals()
                elif not self._commands():
                    self.stopping = True
        self._stop_children()

    def _signals(self) -> None:
        received = os.read(self.wake_r, _READ_BYTES)
        if _ENDING & set(received):
            self.stopping = True
        self._reap()

    def _commands(self) -> bool:
        """Carry out the complete lines that were read; return False at the end of stdin."""
        data = os.read(0, _READ_BYTES)
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._carry_out(line)
        return bool(data)

    def _carry_out(self, line: bytes) -> None:
        try:
            spawn = parse_command(line)
        except ValueError as error:
            self._report({"error": f"bad command: {error}", "id": ""})
            return
        try:
            log_fd = os.open(spawn.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._report({"error": f"cannot open {spawn.log}: {error.strerror}", "id": spawn.id})
            return
        parent = os.getpid()
        # A child that is signalled before it has handlers of its own would use the zygote's, and continue.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            pid = self.fork()
            if pid == 0:
                self._become_child(spawn, log_fd, parent)
        except OSError as error:  # no more processes, or no memory: the children are not affected
            self._report({"error": f"cannot fork: {error.strerror}", "id": spawn.id})
        else:
            self.children[pid] = spawn.id
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(log_fd)

    def _become_child(self, spawn: Spawn, log_fd: int, parent: int) -> None:
        """Release what is the zygote's in the child, run the program, and never return."""
        code = 1
        try:
            signal.signal(_ORPHANED, self._orphaned)
            signal_at_parents_end(_ORPHANED)
            if os.getppid() != parent:
                os._exit(1)  # the zygote died before the line above
            # Reported by the child: if the zygote dies first, its supervisor still knows of this node.
            self._report({"spawned": spawn.id, "pid": os.getpid()})
            os.setsid()  # Ctrl-C at the terminal is for the supervisor, which stops the parts in order
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(
                    number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
                os.dup2(source, target)
            for fd in (null, log_fd, self.wake_r, self.wake_w):
                os.close(fd)
            np.random.seed()  # Python's own generator reseeds itself after a fork
            random.seed()
            sys.argv = [self.name, *spawn.argv]
            setproctitle(title_of(spawn.id))
            code = self.program(spawn.argv)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:  # the forked child ends here, with `code`
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _orphaned(self, *_: object) -> None:
        """End this child, unless the zygote's parent has adopted it."""
        if os.getppid() != self.supervisor:
            os.kill(os.getpid(), signal.SIGTERM)

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            name = self.children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            how = {"code": code} if code >= 0 else {"signal": -code}
            self._report({"exited": name, "pid": pid, **how})

    def _stop_children(self) -> None:
        self._kill_all(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_S
        poll = select.poll()
        poll.register(self.wake_r, select.POLLIN)
        self._reap()
        while self.children and (left_s := deadline_s - time.monotonic()) > 0:
            if poll.poll(left_s * 1000):
                os.read(self.wake_r, _READ_BYTES)
            self._reap()
        self._kill_all(signal.SIGKILL)
        while self.children:
            select.select([self.wake_r], [], [])
            os.read(self.wake_r, _READ_BYTES)
            self._reap()

    def _kill_all(self, number: signal.Signals) -> None:
        # Only children that have not been waited for are listed, so no other process can have the id.
        for pid in self.children:
            os.kill(pid, number)

    def _report(self, event: dict[str, object]) -> None:
        try:
            os.write(1, json.dumps(event).encode() + b"\n")
        except BrokenPipeError:
            self.stopping = True  # the supervisor has ended


def title_of(name: str) -> str:
    """Return the process title of a node or gateway, as `ps` shows it."""
    return f"hypercast {'gateway-0' if name == 'gateway' else name}"


def main(name: str, fork: Callable[[], int] = os.fork) -> int:
    """Run the zygote of a program; return its exit code."""
    if name not in _PROGRAMS:
        print(f"zygote: {name} is none of {', '.join(_PROGRAMS)}", file=sys.stderr)
        return 2
    supervisor = os.getppid()  # the parent at the start, not the one that adopts it later
    setproctitle(f"hypercast zygote ({name})")
    # The imports make a million permanent objects: collection among them takes a second.
    gc.disable()
    program: Program = importlib.import_module(f"{name}.__main__").main
    wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # What was imported stays shared with the children: their collector does not touch it.
    gc.freeze()
    gc.enable()
    Zygote(wake_r, wake_w, supervisor, name, program, fork).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
