"""What serves while a burst goes on, as the platform's change feed tells it."""

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from registry.change import Change, InstanceChanged, LiveChanged
from registry.instance import InstanceRecord, InstanceState
from registry.live import Live, LivePipeline, LiveRecord
from registry.redis_state import RedisState


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Who takes calls: an instance, or a pipeline with `stages` of (node, first layer, behind the last one).
    `rate` is what it serves by the platform's own reckoning, in whole nodes."""

    name: str
    rate: float
    stages: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """From `at_s` on these serve: pipelines, and the nodes with an instance that is ready."""

    at_s: float
    pipelines: tuple[Server, ...]
    ready: tuple[str, ...]

    def since(self, began_s: float, slower: int) -> "Serving":
        """In the model's time since then."""
        at_s = max(0.0, (self.at_s - began_s) / slower)
        return Serving(at_s=at_s, pipelines=self.pipelines, ready=self.ready)


class ServingWatch:
    """Follows the feed in a thread of its own while it is entered; moments are the monotonic clock's. Raises
    what kept it from following to the end: what it has `seen` is not all then."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self.seen: list[Serving] = []
        self._pipelines: dict[tuple[str, int], tuple[LivePipeline, ...]] = {}
        self._ready: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._following = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="serving watch")

    def __enter__(self) -> "ServingWatch":
        self._thread.start()
        self._following.wait()
        if self.failure is not None:
            self._end()
            raise self.failure
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if self.failure is not None and kind is None:
            raise self.failure

    def _end(self) -> None:
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        self._task = self._loop.create_task(self._follow())
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        except Exception as error:  # whatever it is: who measures by this is told
            self.failure = error
        finally:
            self._following.set()
            self._loop.close()

    async def _follow(self) -> None:
        async with RedisState.connect(self._redis_url) as state:
            snapshot = await state.snapshot()
            for instance in snapshot.instances:
                self._instance(instance)
            for told in snapshot.live:
                self._live(told.record)
            self._note()
            self._following.set()
            async for _, change in state.watch(snapshot.cursor):
                self._hear(change)

    def _hear(self, change: Change) -> None:
        if isinstance(change, InstanceChanged):
            self._instance(change.record)
        elif isinstance(change, LiveChanged):
            self._live(change.record)
        else:
            return
        self._note()

    def _instance(self, record: InstanceRecord) -> None:
        if record.state is InstanceState.READY:
            self._ready[record.instance_id] = record.node
        else:
            self._ready.pop(record.instance_id, None)

    def _live(self, record: LiveRecord) -> None:
        self._pipelines[record.function, record.version] = record.pipelines

    def _note(self) -> None:
        serving = Serving(
            at_s=time.monotonic(),
            pipelines=tuple(
                Server(
                    name=one.name,
                    rate=one.rate,
                    stages=tuple((stage.node, stage.first, stage.last) for stage in one.stages),
                )
                for pipelines in self._pipelines.values()
                for one in pipelines
                # A pair is an instance, helped; one that loads alone gives no token before it is an instance.
                if one.way is not Live.ZIGZAG and len(one.stages) > 1
            ),
            ready=tuple(sorted(self._ready.values())),
        )
        if not self.seen or (serving.pipelines, serving.ready) != (
            self.seen[-1].pipelines,
            self.seen[-1].ready,
        ):
            self.seen.append(serving)


def told_of(serving: Serving) -> dict[str, Any]:
    """As it stands in a record."""
    return {
        "at_s": round(serving.at_s, 4),
        "pipelines": [
            {"name": one.name, "rate": round(one.rate, 3), "stages": one.stages} for one in serving.pipelines
        ],
        "ready": serving.ready,
    }
