"""Several hosts on one machine: network namespaces around a bridge, their links shaped both ways.

    with Testbed(hosts=8, shape=LinkShape(rate_bytes_s=25_000_000)) as testbed:
        process = testbed.start(3, [sys.executable, "-m", "some.module", testbed.address(0)])
        print(testbed.link_rate(0, 1, 64 << 20).bytes_per_s)

Needs root, and `ip` and `tc` of iproute2. Everything is removed at the end, also after Ctrl-C; what a run
that was killed left behind goes when the next one starts, or with `python -m benchmarks.testbed --sweep`.
By itself this makes a testbed, measures each link once and says whether the shaping works:
`python -m benchmarks.testbed --hosts 3 --rate 200mbit`.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from benchmarks.arguments import at_least, parser_of, rate, size
from benchmarks.link_rate import LinkRate
from benchmarks.machine import ROOT
from benchmarks.owner import is_left, owner_with
from benchmarks.processes import Processes, module
from benchmarks.processor import read_times
from benchmarks.testbed_plan import Command, LinkShape, TestbedPlan

_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN


class TestbedError(Exception):
    """A testbed cannot be made here, or a command in it failed."""


class Testbed:
    """Namespaces and the processes started in them; a context manager that leaves nothing behind."""

    def __init__(self, hosts: int, shape: LinkShape) -> None:
        self._plan = TestbedPlan(hosts=hosts, shape=shape, owner=owner_with(os.getpid()))
        self._processes = Processes()

    def __repr__(self) -> str:
        rate = self._plan.shape.rate_bit_s(0) / 1e6
        return f"Testbed({self._plan.hosts} hosts at {rate:g} Mbit/s, {self._processes!r})"

    @property
    def plan(self) -> TestbedPlan:
        return self._plan

    def __enter__(self) -> Self:
        """Raises TestbedError."""
        reason = why_not()
        if reason:
            raise TestbedError(reason)
        sweep()
        with ExitStack() as undo:
            undo.callback(self.close)
            for command in self._plan.commands():
                _run(command)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in the testbed and remove it. Idempotent; a Ctrl-C meanwhile waits."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._processes.close()
            existing = set(_namespaces())
            for name in self._plan.namespaces:
                if name in existing:
                    _remove(name)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def address(self, host: int) -> str:
        return self._plan.address(host)

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host."""
        return ["ip", "netns", "exec", self._plan.namespace(host), *command]

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host; it is ended with the testbed, if `stop` has not done so before."""
        return self._processes.start(self.inside(host, command), **options)

    def stop(self, process: subprocess.Popen[Any]) -> None:
        self._processes.stop(process)

    def cut(self, host: int) -> None:
        """Take the host's link down, as if its power had failed: nobody is told. Raises TestbedError."""
        _run(self._plan.cut(host))

    def sent_bytes(self, host: int) -> int:
        """What came from the host over its link so far. Raises TestbedError."""
        told = json.loads(_run(self._plan.sent_bytes(host)))
        return int(told[0]["stats64"]["rx"]["bytes"])

    def link_rate(self, giver: int, taker: int, nbytes: int) -> LinkRate:
        """Copy so much once from one host to another. Raises TestbedError."""
        give = module("benchmarks.link_rate", "give", self.address(giver), nbytes)
        giving = self.start(giver, give, stdout=subprocess.PIPE, text=True)
        try:
            assert giving.stdout is not None
            port = giving.stdout.readline().strip()
            take = module("benchmarks.link_rate", "take", self.address(giver), port)
            told = _run(self.inside(taker, take))
            return LinkRate(**json.loads(told))
        finally:
            self.stop(giving)
            if giving.stdout:
                giving.stdout.close()


def why_not() -> str:
    """Why no testbed can be made here; "" if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are of Linux"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)"
    if _CAPABILITIES & ~_capabilities():
        return "network namespaces need root (CAP_SYS_ADMIN and CAP_NET_ADMIN): run this with sudo"
    return ""


def _capabilities() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)


def sweep() -> list[str]:
    """Remove the namespaces of runs that have ended, and end what still runs in them; returns their names."""
    left = [name for name in _namespaces() if is_left(name)]
    for name in left:
        _remove(name)
    return left


def _remove(namespace: str) -> None:
    for pid in _run(("ip", "netns", "pids", namespace)).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    _run(("ip", "netns", "delete", namespace))


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run(("ip", "netns", "list")).splitlines() if line.strip()]


def _run(command: Command | Sequence[str]) -> str:
    """What the command printed. Raises TestbedError with what it complained of."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, start_new_session=True
    )
    if done.returncode:
        raise TestbedError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("benchmarks.testbed", __doc__)
    add = parser.add_argument
    add("--hosts", type=at_least(2), default=3)
    add("--rate", type=rate, default="200mbit", help="of each host's link, each way (default 200mbit)")
    add("--size", type=size, default="16MiB", help="what is copied to measure a link (default 16MiB)")
    add("--sweep", action="store_true", help="only remove what killed runs left")
    return parser.parse_args(arguments)


def check(hosts: int, rate_bytes_s: int, nbytes: int) -> None:
    """Make a testbed and print what its links carry."""
    with Testbed(hosts, LinkShape(rate_bytes_s=rate_bytes_s)) as testbed:
        for taker in range(1, hosts):
            before = read_times()
            rate = testbed.link_rate(taker - 1, taker, nbytes)
            used = read_times().since(before)
            print(
                f"host {taker - 1} to {taker}: {rate.bytes_per_s * 8e-6:.1f} Mbit/s,"
                f" processors {used.share:.0%} busy"
            )


def main() -> None:
    try:
        args = parse()
        if args.sweep:
            print("\n".join(sweep()) or "nothing was left")
        else:
            check(args.hosts, args.rate, args.size)
    except (TestbedError, ValueError) as error:
        sys.exit(f"testbed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
