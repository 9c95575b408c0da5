"""Fork nodes from one process that has imported their modules, on request in a network namespace.

    python -m benchmarks.harness.node_launcher SOCKET RANK

When its crew closes the connection, the nodes get SIGTERM, then SIGKILL, and this process ends.
"""

import ctypes
import gc
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness.crew_member import serve
from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol, MemberHello
from benchmarks.harness.rival_nodes import (
    DelayedEngines,
    add_free_device,
    with_group_setup,
    with_own_disk,
)
from invoker.__main__ import engines_for
from invoker.__main__ import main as run_node
from invoker.emulated.device_clock import HOP_LATE_S, STEP_LATE_S, DeviceClock, Lateness
from invoker.emulated.engines import EmulatedEngineFactory
from invoker.engine.factory import EngineFactory
from invoker.loading.loader import LoadSources
from registry.config.emulation import is_emulated, parse_device

_NETNS = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_STOP_S = 10.0
_PR_SET_PDEATHSIG = 1


class StartNode(CrewMessage, frozen=True, kw_only=True):
    """Fork `hypercast invoker ARGV`, with its output in `log`; answered by NodeForked.

    The node delays the first byte of a model by `wait_s`, like the set-up of a group of ranks in other
    systems, with `group_s` only where a cast brings it. Without `netns` it stays in this process's network
    namespace. With `store` it reads images that are in no other node from this folder, as if from
    its own disk at `disk_bytes_s`; without `takes_casts` all that are not in its memory. `late_s` and
    `hop_late_s` are what an emulated device forgives. It runs on these `processors` only, if any are given.
    """

    argv: list[str]
    log: str
    netns: str = ""
    wait_s: float = 0.0
    group_s: float = 0.0
    store: str = ""
    disk_bytes_s: float = 0.0
    takes_casts: bool = True
    late_s: float = STEP_LATE_S
    hop_late_s: float = HOP_LATE_S
    processors: tuple[int, ...] = ()


class NodeForked(CrewMessage, frozen=True, kw_only=True):
    """The node's process id."""

    pid: int


PROTOCOL = CrewProtocol.of(StartNode, NodeForked)


def enter(netns: str) -> None:
    """Move this process or thread into a network namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(_NETNS / netns, os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), netns)
    finally:
        os.close(handle)


def run_forked_node(order: StartNode) -> int:
    """Run the node in this fork until SIGTERM; return its exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    if order.processors:
        os.sched_setaffinity(0, order.processors)
    if order.netns:
        enter(order.netns)
    np.random.seed()  # Python's own generator reseeds itself after a fork
    random.seed()

    def engines(device: str) -> EngineFactory:
        found = emulated_engines(device, order) if is_emulated(device) else engines_for(device)
        return DelayedEngines(found, order.wait_s) if order.wait_s else found

    return run_node(order.argv, engines, partial(sources_of, order))


def emulated_engines(device: str, order: StartNode) -> EngineFactory:
    parsed = parse_device(device)
    lateness = Lateness(step_s=order.late_s, hop_s=order.hop_late_s)
    return EmulatedEngineFactory(parsed, DeviceClock(parsed.slower, lateness))


def sources_of(order: StartNode, sources: LoadSources) -> LoadSources:
    """Return the sources with the node's own disk, without casts or with a group set-up, as ordered."""
    if order.store:
        sources = with_own_disk(sources, Path(order.store), order.disk_bytes_s)
    if not order.takes_casts:
        sources = replace(sources, casts=None)
    return with_group_setup(sources, order.group_s) if order.group_s else sources


def fork_node(order: StartNode) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = run_forked_node(order)
    except BaseException:  # the parent's code must not continue in the child
        traceback.print_exc()
    finally:
        os._exit(code)


def stop_nodes(pids: list[int]) -> None:
    """Send SIGTERM, and SIGKILL to processes that do not end."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _STOP_S
    left = set(pids)
    while left and time.monotonic() < deadline_s:
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    path, rank = sys.argv[1:]
    add_free_device()
    gc.freeze()
    pids: list[int] = []

    def carry_out(order: StartNode) -> NodeForked:
        pids.append(fork_node(order))
        return NodeForked(pid=pids[-1])

    try:
        serve(path, MemberHello(rank=int(rank)), PROTOCOL, carry_out)
    finally:
        stop_nodes(pids)


if __name__ == "__main__":
    main()
