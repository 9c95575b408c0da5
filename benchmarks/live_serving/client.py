"""Requests with known tokens, and clients that keep some in flight."""

import asyncio
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from benchmarks.harness.event_stream import StreamFailed, completion, events, start_kind, token_ids
from benchmarks.live_serving.models import VOCABULARY

_FIRST_TOKEN = 3  # lower ids are special tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """A request; `seed` is None for greedy decoding."""

    prompt: tuple[int, ...]
    tokens: int
    seed: int | None

    def body(self, model: str) -> dict[str, object]:
        drawn = {"temperature": 0.9, "top_p": 0.95, "seed": self.seed}
        return completion(model, self.prompt, self.tokens) | ({} if self.seed is None else drawn)


@dataclass(slots=True, kw_only=True)
class LiveAnswer:
    """The response to one request; `arrived_s` has a `time.monotonic` per token."""

    request_id: str
    function: str
    work: LiveRequest
    sent_s: float
    ids: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    start_kind: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""

    def __str__(self) -> str:
        drawn = "greedy" if self.work.seed is None else f"seed {self.work.seed}"
        return f"{self.request_id} ({self.function}, {drawn}, {self.start_kind or 'no start'})"

    def wrong(self, expected: Sequence[int]) -> str:
        """Return how it differs from the expected tokens, or ""."""
        if self.failure:
            return f"{self}: {self.failure} after {len(self.ids)} tokens"
        if self.ids != list(expected):
            pairs = enumerate(zip(self.ids, expected, strict=False))
            first = next((at for at, (a, b) in pairs if a != b), min(len(self.ids), len(expected)))
            return f"{self}: {len(self.ids)} tokens of {len(expected)}, first difference at {first}"
        usage = self.prompt_tokens, self.completion_tokens
        if usage != (len(self.work.prompt), len(expected)):
            return f"{self}: usage is {usage[0]}+{usage[1]} tokens"
        return ""


def draw_requests(chance: random.Random, count: int, tokens: tuple[int, int]) -> list[LiveRequest]:
    """Draw requests of different lengths, half of them greedy."""
    return [
        LiveRequest(
            prompt=draw_prompt(chance, chance.randrange(2, 64)),
            tokens=chance.randint(*tokens),
            seed=number if number % 2 else None,
        )
        for number in range(count)
    ]


def draw_prompt(chance: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(chance.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(tokens))


class LiveClient:
    """A client of one platform; `token_count` counts all tokens, and `token_event` is set at each."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http
        self._numbers = itertools.count()
        self.answers: list[LiveAnswer] = []
        self.token_count = 0
        self.token_event = asyncio.Event()

    async def ask(self, function: str, work: LiveRequest) -> LiveAnswer:
        """Read one response to its end; a failure is reported in the answer."""
        request_id = f"live-{next(self._numbers)}"
        answer = LiveAnswer(request_id=request_id, function=function, work=work, sent_s=time.monotonic())
        headers = {"x-request-id": request_id}
        try:
            async for event in events(self._http, work.body(function), headers=headers, timeout=None):
                self._read(answer, event)
        except StreamFailed as error:
            answer.failure = str(error)
        answer.ended_s = time.monotonic()
        self.answers.append(answer)
        return answer

    def _read(self, answer: LiveAnswer, event: Mapping[str, Any]) -> None:
        if new := token_ids(event):
            answer.ids += new
            answer.arrived_s += [time.monotonic()] * len(new)
            self.token_count += len(new)
            self.token_event.set()
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = (
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
        answer.start_kind = start_kind(event, answer.start_kind)

    async def tokens(self, count: int) -> None:
        """Wait until `count` more tokens have arrived."""
        until = self.token_count + count
        while self.token_count < until:
            self.token_event.clear()
            await self.token_event.wait()


async def run_clients(
    client: LiveClient, function: str, works: Sequence[LiveRequest], clients: int, over: asyncio.Event
) -> None:
    """Keep `clients` requests in flight, cycling through `works`, until `over` is set; all complete."""
    turn = itertools.cycle(works)

    async def one() -> None:
        while not over.is_set():
            await client.ask(function, next(turn))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())
