"""Sends a burst of completions at once and tells, as JSON, when which tokens came.

    python -m benchmarks.scaleout_client URL KEY '{"model": "f", "requests": 50, "prompt_tokens": 512, ...}'

Each prompt is different. Every token of an emulated model is held against what it must say, of others they
are counted: a token that is lost, repeated or changed fails its request. How far it is goes to stderr.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx2

from invoker.emulated.tokens import FIRST_TOKEN, continuation
from registry.messages import Sampling

TELL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What is sent: `emulated` is the architecture of a model that is; token ids are below `vocabulary`."""

    model: str
    emulated: str
    vocabulary: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    timeout_s: float


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request: when tokens came, in seconds since the burst began, and how many each time."""

    arrived_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    start_kind: str = ""
    failure: str = ""


def prompt_of(index: int, tokens: int, vocabulary: int) -> list[int]:
    known = vocabulary - FIRST_TOKEN
    return [FIRST_TOKEN + (index * 7919 + place * 31) % known for place in range(tokens)]


async def ask(client: httpx2.AsyncClient, burst: Burst, index: int, began_s: float, answer: Answer) -> None:
    """Ask for one completion and follow it to its end; `answer` is filled as it comes."""
    prompt, ids = prompt_of(index, burst.prompt_tokens, burst.vocabulary), list[int]()
    body = {
        "model": burst.model,
        "prompt": prompt,
        "max_tokens": burst.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.failure = f"{response.status_code} {(await response.aread())[:300]!r}"
                return
            async for line in response.aiter_lines():
                event = event_of(line)
                new = [token for choice in event.get("choices", ()) for token in choice.get("token_ids", ())]
                if new:
                    answer.arrived_s.append(time.monotonic() - began_s)
                    answer.tokens.append(len(new))
                    ids += new
                answer.start_kind = event.get("hypercast", {}).get("x_start_kind", answer.start_kind)
                answer.failure = json.dumps(event["error"]) if "error" in event else answer.failure
    except httpx2.HTTPError as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.failure = answer.failure or fault(burst, prompt, ids)


def fault(burst: Burst, prompt: list[int], ids: list[int]) -> str:
    """What is wrong with these tokens, "" if nothing is."""
    if len(ids) != burst.output_tokens:
        return f"it has {len(ids)} tokens, not {burst.output_tokens}"
    greedy = Sampling(max_tokens=burst.output_tokens, temperature=0.0)
    if burst.emulated and ids != continuation(prompt, burst.output_tokens, burst.vocabulary, greedy):
        return "its tokens are not those of the model"
    return ""


def event_of(line: str) -> dict[str, Any]:
    """The object in a line of an event stream, an empty one where there is none."""
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return {}
    found = json.loads(line[5:])
    return found if isinstance(found, dict) else {}


async def send(url: str, key: str, burst: Burst) -> tuple[float, list[Answer]]:
    """When it began on the monotonic clock, and what came."""
    limits = httpx2.Limits(max_connections=burst.requests)
    headers = {"authorization": f"Bearer {key}"}
    answers = [Answer() for _ in range(burst.requests)]
    async with httpx2.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=burst.timeout_s, trust_env=False
    ) as client:
        await client.get("/livez")
        began_s = time.monotonic()
        watching = asyncio.create_task(watch(answers, burst))
        await asyncio.gather(*(ask(client, burst, at, began_s, one) for at, one in enumerate(answers)))
        watching.cancel()
    return began_s, answers


async def watch(answers: list[Answer], burst: Burst) -> None:
    """Tell how far it is until cancelled."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(TELL_S)
        first = sum(bool(answer.tokens) for answer in answers)
        done = sum(sum(answer.tokens) >= burst.output_tokens for answer in answers)
        line = f"  {time.monotonic() - began_s:3.0f} s: {first} of {burst.requests} have their first token"
        print(f"{line}, {done} all", file=sys.stderr, flush=True)


def main() -> None:
    url, key, told = sys.argv[1:]
    began_s, answers = asyncio.run(send(url, key, Burst(**json.loads(told))))
    print(json.dumps({"began_s": began_s, "answers": [asdict(answer) for answer in answers]}))


if __name__ == "__main__":
    main()
