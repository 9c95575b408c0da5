"""Requests whose tokens are known beforehand, and a crowd of clients that always has some under way."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from benchmarks.live_serving_models import VOCABULARY

_FIRST_TOKEN = 3  # those before mean something


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is asked for. `seed` is None for the likeliest tokens, else they are drawn with it."""

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
class Answer:
    """What came of one request. `arrived_s` are times of `time.monotonic`, one for each token."""

    request_id: str
    function: str
    work: Work
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
        """Why it is not what it has to be, or ""."""
        if self.failure:
            return f"{self}: {self.failure} after {len(self.ids)} tokens"
        if self.ids != list(expected):
            pairs = enumerate(zip(self.ids, expected, strict=False))
            first = next((at for at, (a, b) in pairs if a != b), min(len(self.ids), len(expected)))
            return f"{self}: {len(self.ids)} tokens of {len(expected)}, the first other one at {first}"
        told = self.prompt_tokens, self.completion_tokens
        if told != (len(self.work.prompt), len(expected)):
            return f"{self}: it is told to be {told[0]}+{told[1]} tokens"
        return ""


def draw_works(chance: random.Random, count: int, tokens: tuple[int, int]) -> list[Work]:
    """Half of them greedy; of different lengths, so that some end at any time."""
    return [
        Work(
            prompt=draw_prompt(chance, chance.randrange(2, 64)),
            tokens=chance.randint(*tokens),
            seed=number if number % 2 else None,
        )
        for number in range(count)
    ]


def draw_prompt(chance: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(chance.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(tokens))


class Caller:
    """Asks one platform. `came` counts all tokens, and `news` is set at each."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http
        self._numbers = itertools.count()
        self.answers: list[Answer] = []
        self.came = 0
        self.news = asyncio.Event()

    async def ask(self, function: str, work: Work) -> Answer:
        """Follow one request to its end; a failure is told in the answer."""
        request_id = f"live-{next(self._numbers)}"
        answer = Answer(request_id=request_id, function=function, work=work, sent_s=time.monotonic())
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
            answer.failure = "the stream broke off"
        answer.ended_s = time.monotonic()
        self.answers.append(answer)
        return answer

    def _read(self, answer: Answer, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event: Mapping[str, Any] = json.loads(line[6:])
        new = [token for choice in event.get("choices", ()) for token in choice.get("token_ids", ())]
        if new:
            answer.ids += new
            answer.arrived_s += [time.monotonic()] * len(new)
            self.came += len(new)
            self.news.set()
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = (
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
        answer.start_kind = event.get("hypercast", {}).get("x_start_kind", answer.start_kind)
        if "error" in event:
            answer.failure = json.dumps(event["error"])

    async def tokens(self, count: int) -> None:
        """Return once so many more have come."""
        until = self.came + count
        while self.came < until:
            self.news.clear()
            await self.news.wait()


async def crowd(
    caller: Caller, function: str, works: Sequence[Work], clients: int, over: asyncio.Event
) -> None:
    """Keep so many requests under way, each work in its turn, until it is over; all of them end."""
    turn = itertools.cycle(works)

    async def one() -> None:
        while not over.is_set():
            await caller.ask(function, next(turn))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())
