"""All that a gateway does for jobs, as one task."""

import asyncio
from collections.abc import Callable

from gateway.jobs.batch_driver import BatchDriver
from gateway.jobs.destinations import parse_destinations
from gateway.jobs.hook_sender import HookSender
from gateway.jobs.runner import JobRunner
from gateway.requests.middleware import RequestMiddleware
from gateway.requests.services import Services


class JobService:
    """The runner, the webhooks and, while `leads`, the batches."""

    def __init__(self, services: Services, requests: RequestMiddleware, leads: Callable[[], bool]) -> None:
        settings = services.settings.jobs
        self.runner = JobRunner(services, requests, settings)
        self.hooks = HookSender(services, settings, parse_destinations(settings.hook_allow))
        self.batches = BatchDriver(services, settings, leads)
        self._events = services.job_events

    def __repr__(self) -> str:
        return f"<JobService {self.runner!r} {self.hooks!r} {self.batches!r}>"

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for part in (self.runner, self.hooks, self.batches, self._events):
                group.create_task(part.run(), name=type(part).__name__)
