"""A start from zero of a function with engine: vllm, on a platform: streams while vLLM starts."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx2
import uvloop

from benchmarks.harness.admin_client import AdminClient, http_client, until
from benchmarks.harness.event_stream import completion, events, token_ids
from benchmarks.harness.local_platform import LocalPlatform, PlatformStateError

WAIT_S = 300.0
WINDOW_S = 2.0  # around the moment at which vLLM serves: the admin routes show it a little later


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """One stream: its tokens, and for each event that has some, when it arrived (`time.monotonic`)."""

    ids: tuple[int, ...]
    arrived_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformStart:
    """Seconds from the first request.

    `ready_s` is when vLLM serves the function, `stream_s` the end of the last stream, in which that was.
    `largest_gap_s` is between two events of one stream, `gap_at_switch_s` the largest of those which lie at
    least partly within WINDOW_S of `ready_s`.
    """

    first_token_s: float
    ready_s: float
    stream_s: float
    largest_gap_s: float
    gap_at_switch_s: float
    streams: tuple[tuple[int, ...], ...]  # the tokens of each


def start_from_zero(
    platform: LocalPlatform, function: str, prompt: Sequence[int], tokens: int
) -> PlatformStart:
    """Stream from a function without instances until vLLM has taken over, and scale it to zero again.

    A stream is as long as the model's context allows, which may be less than vLLM's start takes: streams of
    the same prompt follow each other until one has ended after vLLM became ready. Raises PlatformStateError,
    also if a stream does not have all tokens, StreamFailed.
    """
    return uvloop.run(_start_from_zero(platform, function, prompt, tokens))


def stream_from_vllm(
    platform: LocalPlatform, function: str, prompt: Sequence[int], tokens: int
) -> tuple[int, ...]:
    """Return the tokens of a stream that vLLM makes from the beginning, and scale the function to zero.

    Raises PlatformStateError, StreamFailed.
    """
    return uvloop.run(_stream_from_vllm(platform, function, prompt, tokens))


def figures_of_start(began: float, ready: float, streams: Sequence[TokenStream]) -> PlatformStart:
    """Return the figures of a start, from times by `time.monotonic`.

    Raises PlatformStateError if no stream ran when vLLM became ready.
    """
    arrived = [moment for stream in streams for moment in stream.arrived_s]
    pairs = [pair for stream in streams for pair in pairwise(stream.arrived_s)]
    near = [
        after - before for before, after in pairs if before <= ready + WINDOW_S and after >= ready - WINDOW_S
    ]
    if not near or ready > arrived[-1]:
        raise PlatformStateError("no stream ran when vLLM became ready")
    return PlatformStart(
        first_token_s=arrived[0] - began,
        ready_s=ready - began,
        stream_s=arrived[-1] - began,
        largest_gap_s=max(after - before for before, after in pairs),
        gap_at_switch_s=max(near),
        streams=tuple(stream.ids for stream in streams),
    )


async def _start_from_zero(
    platform: LocalPlatform, function: str, prompt: Sequence[int], tokens: int
) -> PlatformStart:
    async with http_client(platform.url, platform.admin_key, WAIT_S) as http:
        admin = AdminClient(http)
        await _scale_to_zero(admin, platform, function)
        began = time.monotonic()
        watch = asyncio.create_task(_wait_for_vllm(admin, function))
        streams: list[TokenStream] = []
        try:
            while not watch.done() or streams[-1].arrived_s[-1] < watch.result():
                streams.append(await _stream(http, function, prompt, tokens))
            ready = watch.result()
        finally:
            watch.cancel()
        await _scale_to_zero(admin, platform, function)
    return figures_of_start(began, ready, streams)


async def _stream_from_vllm(
    platform: LocalPlatform, function: str, prompt: Sequence[int], tokens: int
) -> tuple[int, ...]:
    async with http_client(platform.url, platform.admin_key, WAIT_S) as http:
        admin = AdminClient(http)
        await admin.scale(function, 1, wait=True)
        await _wait_for_vllm(admin, function)
        stream = await _stream(http, function, prompt, tokens)
        await _scale_to_zero(admin, platform, function)
    return stream.ids


async def _stream(http: httpx2.AsyncClient, function: str, prompt: Sequence[int], tokens: int) -> TokenStream:
    ids: list[int] = []
    arrived: list[float] = []
    async for event in events(http, completion(function, prompt, tokens)):
        if new := token_ids(event):
            ids += new
            arrived.append(time.monotonic())
    if len(ids) != tokens:
        raise PlatformStateError(f"a stream has {len(ids)} tokens instead of {tokens}")
    return TokenStream(ids=tuple(ids), arrived_s=tuple(arrived))


async def _wait_for_vllm(admin: AdminClient, function: str) -> float:
    """Return when vLLM serves the function (`time.monotonic`). Raises PlatformStateError."""

    async def serves() -> bool:
        return [one["engine"] for one in (await admin.function(function))["instances"]] == ["vllm"]

    await until(f"vLLM serves {function}", serves, WAIT_S)
    return time.monotonic()


async def _scale_to_zero(admin: AdminClient, platform: LocalPlatform, function: str) -> None:
    """Scale to zero, and wait until vLLM's process has ended, which would slow what is measured next."""
    await admin.scale_to_zero(function)

    async def no_server() -> bool:
        return not platform.handlers()

    await until("vLLM's process has ended", no_server, WAIT_S)
