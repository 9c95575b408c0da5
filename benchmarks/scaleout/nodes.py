"""Start nodes in the namespaces of a testbed, from one process that has imported their modules.

    stdin   {"netns": "...", "argv": ["--redis-url", ...], "log": "/path", "wait_s": 0.3}   one per line
    stdout  {"pid": 12}

At the end of stdin the nodes get SIGTERM, then SIGKILL, and this process ends. A node delays the first byte
of a model by `wait_s`, like the set-up of a group of ranks in other systems.
"""

import asyncio
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from invoker.__main__ import engines_for
from invoker.assembly import run_node
from invoker.engine.contract import ModelSpec
from invoker.engine.factory import EngineFactory
from invoker.settings import parse_settings
from registry.redis.state import RedisState

_NETNS = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_STOP_S = 10.0
_PR_SET_PDEATHSIG = 1


class DelayedEngines:
    """Engines that delay each start before its model is loaded, where their memory needs are requested."""

    def __init__(self, engines: EngineFactory, wait_s: float) -> None:
        self._engines = engines
        self._wait_s = wait_s
        self.make = engines.make
        self.make_stage = engines.make_stage
        self.binds_early = engines.binds_early

    def kv_bytes(self, spec: ModelSpec, max_concurrency: int) -> tuple[int, int]:
        """Return the inner engines' KV bytes after the delay; called in a thread (see Engines)."""
        time.sleep(self._wait_s)
        return self._engines.kv_bytes(spec, max_concurrency)


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


def run_forked_node(order: dict[str, Any]) -> None:
    """Run the node in this fork until SIGTERM."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    enter(order["netns"])
    settings = parse_settings(order["argv"], os.environ)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        async with RedisState.connect(settings.redis_url) as state:
            await run_node(
                settings, state, DelayedEngines(engines_for(settings.device), order["wait_s"]), stop
            )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def fork_node(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run_forked_node(order)
        code = 0
    except BaseException as error:  # the parent's code must not continue in the child
        print(f"{order['netns']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
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
    gc.freeze()
    pids: list[int] = []
    try:
        for line in sys.stdin:
            pids.append(fork_node(json.loads(line)))
            print(json.dumps({"pid": pids[-1]}), flush=True)
    finally:
        stop_nodes(pids)


if __name__ == "__main__":
    main()
