"""A cluster without `hypercast up`: an embedded Redis, and nodes forked from one process."""

import asyncio
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.harness.crew import Crew, Process, running_crew
from benchmarks.harness.node_launcher import PROTOCOL, NodeForked, StartNode
from benchmarks.harness.processes import Processes, module
from registry.config.secrets import load_or_create_secret
from registry.records.change import NodeUp
from registry.records.node import NodeRecord
from registry.redis.embedded import EmbeddedRedis
from registry.redis.state import RedisState

PATIENCE_S = 300.0


class ForkedCluster:
    """A cluster in a folder; a context manager. Other processes of it are started with `start`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis = EmbeddedRedis(folder)
        self.secret = b""
        self._processes = Processes()
        self._stack = ExitStack()
        self._launcher: Crew | None = None

    def __repr__(self) -> str:
        return f"ForkedCluster({self.folder}, {self._processes!r})"

    def __enter__(self) -> Self:
        """Start Redis and the nodes' launcher. Raises CrewError, StateUnavailable."""
        with self._stack:
            (self.folder / "logs").mkdir(parents=True)
            self.secret = load_or_create_secret(self.folder / "cluster.secret")
            self.redis.prepare()
            self.start(self.redis.command(), "redis-process")
            asyncio.run(self.redis.wait_ready(PATIENCE_S))

            def start(socket: Path, log: IO[bytes]) -> list[Process]:
                return [
                    self._processes.start(module("benchmarks.harness.node_launcher", socket, 0), stderr=log)
                ]

            crew = ("launcher", self.folder / "logs", PROTOCOL, 1, start, self._processes.join, PATIENCE_S)
            self._launcher = self._stack.enter_context(running_crew(*crew))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, command: Sequence[str], name: str) -> subprocess.Popen[Any]:
        """Start a process of the cluster, with its output in logs/NAME.log; it is stopped at the end."""
        log = self._stack.enter_context((self.folder / "logs" / f"{name}.log").open("ab"))
        process = self._processes.start(command, stdout=log, stderr=log)
        self._stack.callback(self._processes.stop, process, PATIENCE_S)
        return process

    def start_node(self, name: str, host: str, *options: object, **how: Any) -> None:
        """Fork a node with these options of `hypercast invoker`, `how`: see StartNode. Raises CrewError."""
        assert self._launcher is not None, "not started"
        argv = ["--redis-url", self.redis.url, "--node-id", name, "--host-id", host, *map(str, options)]
        log = str(self.folder / "logs" / f"{name}.log")
        self._launcher.ask(StartNode(argv=argv, log=log, **how), NodeForked, PATIENCE_S)

    async def registered(self, *names: str) -> list[NodeRecord]:
        """Return the records of these nodes once all have registered. Raises TimeoutError."""
        async with RedisState.connect(self.redis.url) as state, asyncio.timeout(PATIENCE_S):
            snapshot = await state.snapshot()
            there = {node.record.id: node.record for node in snapshot.nodes}
            changes = state.watch(snapshot.cursor)
            while not there.keys() >= set(names):
                _, change = await anext(changes)
                if isinstance(change, NodeUp):
                    there[change.record.id] = change.record
            return [there[name] for name in names]
