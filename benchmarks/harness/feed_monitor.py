"""Monitors of a platform's state in Redis, for what only changes over time show."""

import asyncio
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self

from registry.records.change import Change, Snapshot
from registry.redis.state import RedisState


class StateMonitor(ABC):
    """Reads the state in a thread while entered.

    Raises the error that stopped it, because what it has seen is then incomplete.
    """

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._loop = asyncio.new_event_loop()
        self._following = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="feed monitor")

    @abstractmethod
    async def follow(self, state: RedisState) -> None:
        """Read until cancelled; call `following` once what comes from then on is seen."""

    def following(self) -> None:
        """Let the block begin."""
        self._following.set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._following.wait()
        if self.failure is not None:
            self._stop()
            raise self.failure
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop()
        if self.failure is not None and kind is None:
            raise self.failure

    def _stop(self) -> None:
        with suppress(RuntimeError):  # it has already ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        self._task = self._loop.create_task(self._follow())
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        except Exception as error:  # raised when the block ends
            self.failure = error
        finally:
            self._following.set()
            self._loop.close()

    async def _follow(self) -> None:
        async with RedisState.connect(self._redis_url) as state:
            await self.follow(state)


class FeedMonitor(StateMonitor):
    """Follows the change feed."""

    @abstractmethod
    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the state at the beginning."""

    @abstractmethod
    def on_change(self, change: Change) -> None:
        """Take a change."""

    async def follow(self, state: RedisState) -> None:
        """Take the snapshot, then all changes."""
        snapshot = await state.snapshot()
        self.on_snapshot(snapshot)
        self.following()
        async for _, change in state.watch(snapshot.cursor):
            self.on_change(change)
