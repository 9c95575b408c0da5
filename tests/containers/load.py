"""Requests under load, as behind a balancer: the next gateway where one does not take a request."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from benchmarks.chaos.load import (
    ExpectedAnswer,
    IssuedRequest,
    RequestFate,
    RequestTemplate,
    TenantClient,
    request_templates,
)
from tests.fixtures.patience import PATIENCE_S

CLIENTS = 4
REQUESTS = 200  # at least, and for as long as what happens meanwhile takes
_LIMIT_S = 90.0
_PAUSE_S = 0.1  # of a client that no gateway took a request from
# Outcomes of a request that the gateway has not begun.
_NOT_TAKEN = (RequestFate.UNREACHED, RequestFate.REFUSED)


@dataclass
class Load:
    """Clients which send one request after another, and compare each answer with the one without faults."""

    urls: Sequence[str]
    key: str
    works: Sequence[RequestTemplate]
    logs: Callable[[], str]  # shown with a request that is lost
    done: list[IssuedRequest] = field(default_factory=list)
    moved: int = 0  # requests which the first gateway did not take
    lost: list[IssuedRequest] = field(default_factory=list)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _over: bool = False

    async def some_more(self, requests: int) -> None:
        """Wait until more requests have been answered. Raises AssertionError if one was lost."""
        wanted = len(self.done) + requests
        async with asyncio.timeout(PATIENCE_S):
            while len(self.done) < wanted and not self.lost:
                self._ended.clear()
                await self._ended.wait()
        await self.check()

    async def check(self) -> None:
        """Raise AssertionError if a request was lost."""
        if self.lost:
            raise AssertionError("\n".join([*map(str, self.lost), await asyncio.to_thread(self.logs)]))

    async def run_client(self, number: int) -> None:
        """Send requests until the load ends."""
        for turn in itertools.count():
            if self.lost or (self._over and len(self.done) >= REQUESTS):
                return
            work = self.works[(number + turn) % len(self.works)]
            ended = await self._send(f"load-{number}-{turn}", number + turn, work)
            (self.done if ended.fate is RequestFate.ACKNOWLEDGED else self.lost).append(ended)
            self._ended.set()

    async def _send(self, request_id: str, first: int, work: RequestTemplate) -> IssuedRequest:
        deadline_s = asyncio.get_running_loop().time() + _LIMIT_S
        for attempt in itertools.count():
            index = (first + attempt) % len(self.urls)
            client = TenantClient(index, self.urls[index], "acme", self.key)
            ended, _ = await client.ask(request_id, work, _LIMIT_S)
            if ended.fate not in _NOT_TAKEN or asyncio.get_running_loop().time() > deadline_s:
                return ended
            self.moved += 1
            if attempt % len(self.urls):
                await asyncio.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    def end(self) -> None:
        """Let the clients end, once enough requests were sent."""
        self._over = True


async def expected_works(url: str, key: str) -> list[RequestTemplate]:
    """Return requests of all kinds but handlers, with their answers when nothing fails."""
    client = TenantClient(0, url, "acme", key)
    works = []
    for work in request_templates(24):
        if work.name in ("greedy", "seeded", "whole"):
            ended, answer = await client.ask(f"expected-{len(works)}", work, _LIMIT_S)
            assert isinstance(answer, ExpectedAnswer), ended
            works.append(replace(work, answer=answer))
    return works


@asynccontextmanager
async def load_on(urls: Sequence[str], key: str, logs: Callable[[], str]) -> AsyncIterator[Load]:
    """Yield a load which runs; at the end it has sent 200 requests at least, of which none was lost."""
    load = Load(urls, key, await expected_works(urls[0], key), logs)
    tasks = [asyncio.create_task(load.run_client(number)) for number in range(CLIENTS)]
    try:
        yield load
        load.end()
        await asyncio.gather(*tasks)
        await load.check()
    finally:
        for task in tasks:
            task.cancel()
