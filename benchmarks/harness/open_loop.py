"""An open-loop client: each request is sent at its time, whether or not earlier ones are complete."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.harness.http_exchange import HttpEndpoint
from benchmarks.harness.processor import process_cpu_s
from benchmarks.harness.stream_client import StreamResult, stream_completion
from benchmarks.harness.traces import TraceRequest

REQUEST_TIMEOUT_S = 1800.0


@dataclass(slots=True, kw_only=True)
class Replay:
    """One replay in progress. Latencies count from the scheduled times."""

    run: str
    target: HttpEndpoint
    functions: Sequence[str]
    arrivals: Sequence[TraceRequest]
    speedup: float
    prompts: "PromptPool"
    bodies: Sequence[bytes] = ()
    finished: list[StreamResult] = field(default_factory=list)
    moments_s: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    interrupted: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def late_s(self) -> list[float]:
        """How long after its scheduled time each finished request was sent."""
        return [done.late_s for done in self.finished]

    async def go(self, stop: asyncio.Event) -> None:
        """Send all requests and wait for the responses; `stop` abandons the rest."""
        if not self.bodies:
            self.prepare()
        started_s, started_cpu_s = time.perf_counter(), process_cpu_s()
        stopping = asyncio.create_task(stop.wait())
        work = asyncio.create_task(self._all(started_s))
        try:
            await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
            self.interrupted = not work.done()
            if work.done():
                work.result()
        finally:
            for task in (work, stopping):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            self.wall_s, self.cpu_s = time.perf_counter() - started_s, process_cpu_s() - started_cpu_s

    def prepare(self) -> None:
        """Make all bodies, so that a burst is not late for that."""
        self.bodies = [
            self.prompts.body(self.functions[arrival.function], index, arrival)
            for index, arrival in enumerate(self.arrivals)
        ]

    async def _all(self, started_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for index, arrival in enumerate(self.arrivals):
                at_s = started_s + arrival.offset_s / self.speedup
                await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
                self.sent += 1
                group.create_task(self._one(index, arrival, at_s))

    async def _one(self, index: int, arrival: TraceRequest, due_s: float) -> None:
        name = f"{self.run}-{index}"
        self.moments_s[name] = arrival.offset_s / self.speedup
        done = await stream_completion(self.target, name, self.bodies[index], REQUEST_TIMEOUT_S, due_s)
        expected = arrival.prompt_tokens, arrival.output_tokens
        if not done.failure and (done.prompt_tokens, done.completion_tokens) != expected:
            done.failure = "wrong length"
        self.finished.append(done)


@dataclass(frozen=True, slots=True)
class PromptPool:
    """Pseudo-random token ids, equal in each run: slices of one long list."""

    ids: tuple[str, ...]

    @classmethod
    def of(cls, vocabulary: int, longest: int, first: int = 0) -> "PromptPool":
        """Draw enough ids of `[first, vocabulary)` for prompts of `longest` tokens."""
        draw = random.Random(0)
        return cls(tuple(str(draw.randrange(first, vocabulary)) for _ in range(2 * longest + 1)))

    def body(self, function: str, index: int, arrival: TraceRequest) -> bytes:
        """Return a completion request with exactly the lengths of the trace."""
        start = index * 7919 % (len(self.ids) - arrival.prompt_tokens)
        ids = ",".join(self.ids[start : start + arrival.prompt_tokens])
        return (
            f'{{"model":{json.dumps(function)},"prompt":[{ids}],"max_tokens":{arrival.output_tokens},'
            '"temperature":0,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}'
        ).encode()
