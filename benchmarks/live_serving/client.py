"""Requests with known tokens, and clients that keep some in flight."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

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
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "ignore_eos": True,
            **({"temperature": 0} if self.seed is None else drawn),
        }


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
        ended = False
        try:
            stream = self._http.stream(
                "POST", "/v1/completions", json=work.body(function), headers=headers, timeout=None
            )
            async with stream as response:
                if response.status_code != 200:
                    answer.failure = f"{response.status_code} {(await response.aread())[:300]!r}"
                else:
                    async for line in response.aiter_lines():
                        ended = ended or line == "data: [DONE]"
                        self._read(answer, line)
        except httpx2.HTTPError as error:
            answer.failure = f"{type(error).__name__}: {error}"
        if not (ended or answer.failure):
            answer.failure = "the stream ended without [DONE]"
        answer.ended_s = time.monotonic()
        self.answers.append(answer)
        return answer

    def _read(self, answer: LiveAnswer, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event: Mapping[str, Any] = json.loads(line[6:])
        new = [token for choice in event.get("choices", ()) for token in choice.get("token_ids", ())]
        if new:
            answer.ids += new
            answer.arrived_s += [time.monotonic()] * len(new)
            self.token_count += len(new)
            self.token_event.set()
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = (
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
        answer.start_kind = event.get("hypercast", {}).get("x_start_kind", answer.start_kind)
        if "error" in event:
            answer.failure = json.dumps(event["error"])

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
