"""The events of jobs on one gateway: one watch of the shared state serves all who wait for them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import TypeVar

from registry.errors import StateUnavailable
from registry.records.batch import BatchCounts, BatchRecord
from registry.records.job import Job, JobEvent, JobEventKind
from registry.state import State

_log = logging.getLogger("hypercast.gateway")

_RETRY_S = 0.5

T = TypeVar("T")

OnJobEvents = Callable[[Sequence[JobEvent]], None]
"""Called with events; with none when some may have been missed."""


class JobEvents:
    """The watch of job events, and those who listen."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._listeners: list[OnJobEvents] = []

    def __repr__(self) -> str:
        return f"<JobEvents {len(self._listeners)} listening>"

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                async with aclosing(self._state.watch_jobs()) as watch:  # type: ignore[type-var]
                    async for events in watch:
                        for listener in list(self._listeners):
                            listener(events)
            except StateUnavailable as error:
                _log.info("job events: %s", error)
                await asyncio.sleep(_RETRY_S)

    @contextmanager
    def listening(self, listener: OnJobEvents) -> Iterator[None]:
        """Call `listener` while the context is open."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def wait_ended(self, job_id: str, limit_s: float) -> Job:
        """Return the job once it has ended, or as it is after `limit_s`. Raises RegistryError."""
        event = JobEvent(JobEventKind.ENDED, job_id)
        return await self._wait(
            lambda: self._state.job(job_id), lambda job: job.status.is_final, event, limit_s
        )

    async def wait_batch_ended(self, batch_id: str, limit_s: float) -> tuple[BatchRecord, BatchCounts]:
        """Return the batch once it has ended, or as it is after `limit_s`. Raises RegistryError."""
        event = JobEvent(JobEventKind.BATCH, batch_id)
        return await self._wait(
            lambda: self._state.batch(batch_id), lambda found: found[0].status.is_final, event, limit_s
        )

    async def _wait(
        self,
        read: Callable[[], Awaitable[T]],
        has_ended: Callable[[T], bool],
        event: JobEvent,
        limit_s: float,
    ) -> T:
        happened = asyncio.Event()

        def listen(events: Sequence[JobEvent]) -> None:
            if not events or event in events:
                happened.set()

        with self.listening(listen), suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not has_ended(found := await read()):
                    await happened.wait()
                    happened.clear()
                return found
        return await read()
