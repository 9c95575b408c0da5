"""Streams of which a fixed number is in flight, requested from a host of the testbed while a block runs."""

import asyncio
import itertools
import secrets
import threading
from dataclasses import dataclass
from typing import Self

from benchmarks.harness.http_exchange import HttpEndpoint
from benchmarks.harness.node_launcher import enter
from benchmarks.harness.open_loop import PromptPool
from benchmarks.harness.stream_client import StreamResult, stream_completion
from benchmarks.harness.traces import TraceRequest
from invoker.emulated.tokens import FIRST_TOKEN

_TIMEOUT_S = 120.0
_STAGGER_S = 0.3  # between the first requests, so that they do not run in step


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Requests to `function`, of which `concurrent` are in flight: each follows at once on another's end.

    At a fixed rate of requests a slower engine would have more of them in flight, which slows it further.
    """

    function: str
    vocabulary: int
    concurrent: int
    prompt_tokens: int
    output_tokens: int


class Streams:
    """Requests streams in a thread of its own while entered; at the end all of them are complete.

    No other stream follows one that failed.
    Raises the error that stopped it, because what it has measured is then incomplete.
    """

    def __init__(self, netns: str, target: HttpEndpoint, order: StreamOrder) -> None:
        self._netns = netns
        self._target = target
        self._order = order
        self._request = TraceRequest(0.0, order.prompt_tokens, order.output_tokens)
        self._prompts = PromptPool.of(order.vocabulary, order.prompt_tokens, FIRST_TOKEN)
        self._name = f"{order.function}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="streams")
        self.finished: list[StreamResult] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None and kind is None:
            raise self._failure

    def _work(self) -> None:
        try:
            enter(self._netns)
            asyncio.run(self._all())
        except Exception as error:  # raised when the block ends
            self._failure = error

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for place in range(self._order.concurrent):
                group.create_task(self._one_after_another(place))

    async def _one_after_another(self, place: int) -> None:
        await asyncio.sleep(place * _STAGGER_S)
        failed = False
        while not failed and not self._stop.is_set():
            done = await self._one()
            failed = bool(done.failure)
            self.finished.append(done)

    async def _one(self) -> StreamResult:
        index = next(self._numbers)
        body = self._prompts.body(self._order.function, index, self._request)
        done = await stream_completion(self._target, f"{self._name}-{index}", body, _TIMEOUT_S)
        if not done.failure and done.completion_tokens != self._order.output_tokens:
            done.failure = "wrong length"
        return done
