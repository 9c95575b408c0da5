"""The watchers of one gateway: one task serves all of them, and only while there are some."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress

from gateway.core.contract import ClusterOperations
from gateway.core.errors import ApiError
from gateway.watch.board import BoardInput, WatchBoard
from gateway.watch.scope import WatchScope
from gateway.watch.traffic import SAMPLE_S, TrafficMeter
from registry.clock import Clock
from registry.errors import RegistryError
from registry.messages.arrivals import Arrivals

log = logging.getLogger(__name__)

FRAME_S = 0.1  # between two frames, at least
MAX_WATCHERS = 256
MAX_OF_TENANT = 128
_MAX_LATE = 16  # frames that a watcher has not read; then it gets a whole one instead
_RETRY_S = 1.0  # after a node has reported nothing


class Watcher:
    """One watcher's frames, oldest first."""

    def __init__(self, scope: WatchScope, tenant: str) -> None:
        self.scope = scope
        self.tenant = tenant
        self._frames: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.needs_whole = True

    def __repr__(self) -> str:
        return f"<Watcher of {self.tenant} {len(self._frames)} frames>"

    def put(self, frame: bytes, *, whole: bool = False) -> None:
        """Add a frame; a whole one replaces those before it."""
        if whole:
            self.needs_whole = False
            self._frames.clear()
        elif self.needs_whole:
            return
        elif len(self._frames) >= _MAX_LATE:
            self._frames.clear()
            self.needs_whole = True
            return
        self._frames.append(frame)
        self._news.set()

    async def next(self, limit_s: float) -> bytes | None:
        """Return the next frame, None after `limit_s` without one."""
        if not self._frames:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._news.wait()
        return self._frames.popleft() if self._frames else None


class WatchHub:
    """All watchers of this gateway, at most 256, and 128 of one tenant."""

    def __init__(self, cluster: ClusterOperations, clock: Clock, gateway: str) -> None:
        self._cluster = cluster
        self._clock = clock
        self._gateway = gateway
        self._watchers: set[Watcher] = set()
        self._tenants: Counter[str] = Counter()
        self._arrivals: dict[str, Arrivals] = {}
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()  # something may have changed
        cluster.subscribe(self._on_change)

    def __repr__(self) -> str:
        return f"<WatchHub {len(self._watchers)} watchers, {len(self._followed)} nodes followed>"

    def _on_change(self) -> None:
        if self._watchers:
            self._news.set()

    @contextmanager
    def join(self, scope: WatchScope, tenant: str) -> Iterator[Watcher]:
        """Add a watcher while the block lasts. Raises ApiError (503) if there are too many."""
        if len(self._watchers) >= MAX_WATCHERS or self._tenants[tenant] >= MAX_OF_TENANT:
            message = (
                f"this gateway has {len(self._watchers)} watchers, {self._tenants[tenant]} of this tenant"
            )
            raise ApiError(503, "overloaded", message, retry_after_s=5)
        watcher = Watcher(scope, tenant)
        self._watchers.add(watcher)
        self._tenants[tenant] += 1
        self._news.set()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]

    async def run(self) -> None:
        """Serve watchers until cancelled."""
        while True:
            if not self._watchers:
                self._news.clear()
                await self._news.wait()
                continue
            try:
                async with asyncio.TaskGroup() as group:
                    await self._serve(group)
                    for task in self._followed.values():
                        task.cancel()
            except* Exception:  # a fault of what is only shown must not end the gateway
                log.exception("the watch has failed, and begins anew")
                await asyncio.sleep(_RETRY_S)
            self._followed.clear()
            self._arrivals.clear()
            for watcher in self._watchers:
                watcher.needs_whole = True

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        """Send frames as long as there are watchers."""
        board, meter = WatchBoard(), TrafficMeter(self._gateway)
        while self._watchers:
            self._news.clear()
            self._send(board, meter)
            self._follow(board.follow, group)
            await asyncio.sleep(FRAME_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(SAMPLE_S - FRAME_S):
                    await self._news.wait()

    def _send(self, board: WatchBoard, meter: TrafficMeter) -> None:
        view, now = self._cluster.view(), self._clock.wall_s()
        meter.sample(self._cluster.traffic(), view.load_reports, self._clock.monotonic_s())
        meter.keep(frozenset(one.name for one in view.functions))
        change = board.update(
            BoardInput(
                view=view,
                arrivals=self._arrivals,
                ended=self._cluster.ended_parts,
                traffic=meter.shown(view.load_reports),
            )
        )
        frames: dict[WatchScope, bytes | None] = {}
        wholes: dict[WatchScope, bytes] = {}
        for watcher in self._watchers:
            scope = watcher.scope
            if watcher.needs_whole:
                if scope not in wholes:
                    wholes[scope] = board.whole(scope, now)
                watcher.put(wholes[scope], whole=True)
                continue
            if scope not in frames:
                frames[scope] = board.frame(change, scope, now) if change else None
            if (frame := frames[scope]) is not None:
                watcher.put(frame)

    def _follow(self, nodes: list[str], group: asyncio.TaskGroup) -> None:
        """Follow what arrives on these nodes, and on no others."""
        wanted = set(nodes)
        for node in self._followed.keys() - wanted:
            self._followed.pop(node).cancel()
        for node in wanted - self._followed.keys():
            task = group.create_task(self._read(node), name=f"arrivals of {node}")
            self._followed[node] = task

    async def _read(self, node: str) -> None:
        """Take what the node reports until cancelled."""
        try:
            while True:
                try:
                    async with aclosing(self._cluster.arrivals(node)) as feed:  # type: ignore[type-var]
                        async for arrivals in feed:
                            self._arrivals[node] = arrivals
                            self._news.set()
                except RegistryError as error:  # it is lost, or of an earlier release
                    log.debug("node %s reports no arrivals: %s", node, error)
                self._arrivals.pop(node, None)
                await asyncio.sleep(_RETRY_S)
        finally:
            self._arrivals.pop(node, None)
