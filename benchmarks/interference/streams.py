"""Streams that are requested at a fixed interval, from a host of the testbed, while a block runs."""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Self

from benchmarks.harness.http_exchange import HttpEndpoint
from benchmarks.harness.node_launcher import enter
from benchmarks.harness.open_loop import PromptPool
from benchmarks.harness.stream_client import StreamResult, stream_completion
from benchmarks.harness.traces import TraceRequest
from invoker.emulated.tokens import FIRST_TOKEN

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Requests to `function`, one each `interval_s`, whether or not earlier ones are answered."""

    function: str
    vocabulary: int
    interval_s: float
    prompt_tokens: int
    output_tokens: int


class Streams:
    """Requests streams in a thread of its own while entered; at the end all of them are complete.

    Raises the error that stopped it, because what it has measured is then incomplete.
    """

    def __init__(self, netns: str, target: HttpEndpoint, order: StreamOrder) -> None:
        self._netns = netns
        self._target = target
        self._order = order
        self._request = TraceRequest(0.0, order.prompt_tokens, order.output_tokens)
        self._prompts = PromptPool.of(order.vocabulary, order.prompt_tokens, FIRST_TOKEN)
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
        due_s, index = time.perf_counter(), 0
        async with asyncio.TaskGroup() as group:
            while not self._stop.is_set():
                group.create_task(self._one(index, due_s))
                due_s, index = due_s + self._order.interval_s, index + 1
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))

    async def _one(self, index: int, due_s: float) -> None:
        body = self._prompts.body(self._order.function, index, self._request)
        name = f"{self._order.function}-{due_s:.6f}"
        done = await stream_completion(self._target, name, body, _TIMEOUT_S, due_s)
        if not done.failure and done.completion_tokens != self._order.output_tokens:
            done.failure = "wrong length"
        self.finished.append(done)
