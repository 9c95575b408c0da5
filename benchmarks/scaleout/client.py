"""Send bursts of completions at once and report when each token arrived.

    python -m benchmarks.scaleout.client SOCKET RANK URL KEY

Each prompt is different. Tokens of an emulated model are compared with the expected ones, others are counted:
a lost, repeated or changed token fails its request. Progress goes to stderr.
"""

import asyncio
import sys
import time
from functools import partial

import httpx2
import msgspec

from benchmarks.harness.admin_client import http_client
from benchmarks.harness.crew_member import serve_async
from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol, MemberHello
from benchmarks.harness.event_stream import StreamFailed, completion, events, start_kind, token_ids
from invoker.emulated.tokens import FIRST_TOKEN, continuation
from registry.messages.sampling import Sampling

PROGRESS_S = 5.0


class Burst(CrewMessage, frozen=True, kw_only=True):
    """Send these requests; answered by BurstSent.

    `emulated` is an emulated architecture or "", ids are below `vocabulary`.
    """

    model: str
    emulated: str
    vocabulary: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    timeout_s: float


class BurstAnswer(msgspec.Struct, kw_only=True):
    """One request: when tokens arrived, in seconds since the burst, and how many each time."""

    arrived_s: list[float] = msgspec.field(default_factory=list)
    tokens: list[int] = msgspec.field(default_factory=list)
    start_kind: str = ""
    failure: str = ""


class BurstSent(CrewMessage, frozen=True, kw_only=True):
    """When the burst began on the machine's monotonic clock, and the answers."""

    started_s: float
    answers: list[BurstAnswer]


PROTOCOL = CrewProtocol.of(Burst, BurstSent)


def prompt_of(index: int, tokens: int, vocabulary: int) -> list[int]:
    known = vocabulary - FIRST_TOKEN
    return [FIRST_TOKEN + (index * 7919 + place * 31) % known for place in range(tokens)]


async def request_completion(
    client: httpx2.AsyncClient, burst: Burst, index: int, started_s: float, answer: BurstAnswer
) -> None:
    """Request one completion and read it to its end into `answer`."""
    prompt, ids = prompt_of(index, burst.prompt_tokens, burst.vocabulary), list[int]()
    try:
        async for event in events(client, completion(burst.model, prompt, burst.output_tokens)):
            if new := token_ids(event):
                answer.arrived_s.append(time.monotonic() - started_s)
                answer.tokens.append(len(new))
                ids += new
            answer.start_kind = start_kind(event, answer.start_kind)
    except StreamFailed as error:
        answer.failure = str(error)
    answer.failure = answer.failure or token_error(burst, prompt, ids)


def token_error(burst: Burst, prompt: list[int], ids: list[int]) -> str:
    """Return what is wrong with the tokens, or ""."""
    if len(ids) != burst.output_tokens:
        return f"received {len(ids)} tokens, not {burst.output_tokens}"
    greedy = Sampling(max_tokens=burst.output_tokens, temperature=0.0)
    if burst.emulated and ids != continuation(prompt, burst.output_tokens, burst.vocabulary, greedy):
        return "the tokens differ from the model's"
    return ""


async def send(url: str, key: str, burst: Burst) -> BurstSent:
    answers = [BurstAnswer() for _ in range(burst.requests)]
    async with http_client(url, key, burst.timeout_s) as client:
        await client.get("/livez")
        started_s = time.monotonic()
        watching = asyncio.create_task(watch(answers, burst))
        await asyncio.gather(
            *(request_completion(client, burst, at, started_s, one) for at, one in enumerate(answers))
        )
        watching.cancel()
    return BurstSent(started_s=started_s, answers=answers)


async def watch(answers: list[BurstAnswer], burst: Burst) -> None:
    """Print progress until cancelled."""
    started_s = time.monotonic()
    while True:
        await asyncio.sleep(PROGRESS_S)
        first = sum(bool(answer.tokens) for answer in answers)
        done = sum(sum(answer.tokens) >= burst.output_tokens for answer in answers)
        line = f"  {time.monotonic() - started_s:3.0f} s: {first} of {burst.requests} with a first token"
        print(f"{line}, {done} complete", file=sys.stderr, flush=True)


def main() -> None:
    path, rank, url, key = sys.argv[1:]
    asyncio.run(serve_async(path, MemberHello(rank=int(rank)), PROTOCOL, partial(send, url, key)))


if __name__ == "__main__":
    main()
