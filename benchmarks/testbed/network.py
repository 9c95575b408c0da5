"""Several hosts on one machine: network namespaces around a bridge, with links shaped both ways.

    with Testbed(hosts=8, shape=LinkShape(rate_bytes_s=25_000_000)) as testbed:
        process = testbed.start(3, [sys.executable, "-m", "some.module", testbed.address(0)])
        print(testbed.link_rate(0, 1, 64 << 20).bytes_per_s)

Needs root, and `ip` and `tc` of iproute2. Everything is removed at the end, also after Ctrl-C; leftovers of a
killed run are removed when the next one starts, or by --sweep. As a command it builds a testbed, measures
each link once and prints the rates, which shows whether the shaping works.

examples:
  sudo python -m benchmarks.testbed --hosts 3 --rate 200mbit
  sudo python -m benchmarks.testbed --sweep
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

from benchmarks.harness.arguments import at_least, make_parser, rate, size
from benchmarks.harness.owner import is_orphaned, owner_for_pid
from benchmarks.harness.processes import ROOT, Processes, module
from benchmarks.harness.processor import read_times
from benchmarks.testbed.link_rate import LinkMeasurement
from benchmarks.testbed.plan import Command, LinkShape, Spine, TestbedPlan

_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN


class TestbedError(Exception):
    """A testbed cannot be made here, or a command in it failed."""


class Testbed:
    """Namespaces and the processes started in them; a context manager that removes both."""

    def __init__(self, hosts: int, shape: LinkShape, spine: Spine | None = None) -> None:
        self._plan = TestbedPlan(hosts=hosts, shape=shape, owner=owner_for_pid(os.getpid()), spine=spine)
        self._processes = Processes()

    def __repr__(self) -> str:
        rate = self._plan.shape.rate_bit_s(0) / 1e6
        return f"Testbed({self._plan.hosts} hosts at {rate:g} Mbit/s, {self._processes!r})"

    @property
    def plan(self) -> TestbedPlan:
        return self._plan

    def __enter__(self) -> Self:
        """Make the namespaces. Raises TestbedError."""
        reason = unavailable_reason()
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
        """End the testbed's processes and remove it. Idempotent; Ctrl-C is deferred meanwhile."""
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
        """Return the command line that runs `command` on a host."""
        return ["ip", "netns", "exec", self._plan.namespace(host), *command]

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host; it ends with the testbed, unless stopped before."""
        return self._processes.start(self.inside(host, command), **options)

    def stop(self, process: subprocess.Popen[Any]) -> None:
        self._processes.stop(process)

    def cut(self, host: int) -> None:
        """Take the host's link down, unnoticed by both sides, like a power failure. Raises TestbedError."""
        _run(self._plan.cut(host))

    def set_bands(self, apart: bool) -> None:
        """Give the packets of all links their bands, or one queue; what is queued is lost.

        Raises TestbedError, and ValueError if the links are shaped without bands.
        """
        for command in self._plan.set_bands(apart):
            _run(command)

    def sent_bytes(self, host: int) -> int:
        """Return the bytes that the host has sent over its link. Raises TestbedError."""
        reported = json.loads(_run(self._plan.sent_bytes(host)))
        return int(reported[0]["stats64"]["rx"]["bytes"])

    def spine_bytes(self) -> int:
        """Return the bytes that all leaf switches have sent to the spine. Raises TestbedError."""
        reported = [json.loads(_run(command)) for command in self._plan.spine_bytes()]
        return sum(int(one[0]["stats64"]["tx"]["bytes"]) for one in reported)

    def link_rate(self, sender: int, receiver: int, nbytes: int) -> LinkMeasurement:
        """Copy `nbytes` once from one host to another. Raises TestbedError."""
        give = module("benchmarks.testbed.link_rate", "give", self.address(sender), nbytes)
        sending = self.start(sender, give, stdout=subprocess.PIPE, text=True)
        try:
            assert sending.stdout is not None
            port = sending.stdout.readline().strip()
            take = module("benchmarks.testbed.link_rate", "take", self.address(sender), port)
            output = _run(self.inside(receiver, take))
            return LinkMeasurement(**json.loads(output))
        finally:
            self.stop(sending)
            if sending.stdout:
                sending.stdout.close()


def unavailable_reason() -> str:
    """Return why no testbed can be made here, or ""."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
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
    """Remove the namespaces of ended runs with the processes in them; return their names."""
    left = [name for name in _namespaces() if is_orphaned(name)]
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
    """Return the command's output. Raises TestbedError with its error output."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, start_new_session=True
    )
    if done.returncode:
        raise TestbedError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.testbed", __doc__)
    add = parser.add_argument
    add("--hosts", type=at_least(2), default=3, help="hosts")
    add("--rate", type=rate, default="200mbit", help="rate of each link, each way")
    add("--size", type=size, default="16MiB", help="bytes copied to measure a link")
    add("--sweep", action="store_true", help="only remove leftovers of killed runs")
    return parser.parse_args(arguments)


def check(hosts: int, rate_bytes_s: int, nbytes: int) -> None:
    """Make a testbed and print the rates of its links."""
    with Testbed(hosts, LinkShape(rate_bytes_s=rate_bytes_s)) as testbed:
        for receiver in range(1, hosts):
            before = read_times()
            rate = testbed.link_rate(receiver - 1, receiver, nbytes)
            used = read_times().since(before)
            print(
                f"host {receiver - 1} to {receiver}: {rate.bytes_per_s * 8e-6:.1f} Mbit/s,"
                f" CPU {used.share:.0%}"
            )


def main() -> None:
    try:
        args = parse()
        if args.sweep:
            print("\n".join(sweep()) or "nothing to remove")
        else:
            check(args.hosts, args.rate, args.size)
    except (TestbedError, ValueError) as error:
        sys.exit(f"testbed: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
