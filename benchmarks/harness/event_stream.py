"""Events of streamed completions, for clients that look at each token."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx2


class StreamFailed(Exception):
    """A completion was refused, or its stream failed or ended too soon."""


def completion(model: str, prompt: Sequence[int], tokens: int) -> dict[str, object]:
    """Return a greedy request that streams exactly this many token ids, and its usage."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
    }


async def events(
    http: httpx2.AsyncClient, body: Mapping[str, object], **options: Any
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a completion to its end. Raises StreamFailed."""
    ended = False
    try:
        async with http.stream("POST", "/v1/completions", json=body, **options) as response:
            if response.status_code != 200:
                raise StreamFailed(f"{response.status_code} {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if event := event_of(line):
                    if "error" in event:
                        raise StreamFailed(json.dumps(event["error"]))
                    yield event
    except httpx2.HTTPError as error:
        raise StreamFailed(f"{type(error).__name__}: {error}") from error
    if not ended:
        raise StreamFailed("the stream ended without [DONE]")


def event_of(line: str) -> dict[str, Any]:
    """Return the object in a line of an event stream, or an empty one."""
    if not line.startswith("data: {"):
        return {}
    found: dict[str, Any] = json.loads(line[6:])
    return found


def token_ids(event: Mapping[str, Any]) -> list[int]:
    """Return the tokens of an event."""
    return [token for choice in event.get("choices", ()) for token in choice.get("token_ids", ())]


def start_kind(event: Mapping[str, Any], before: str) -> str:
    """Return the start kind that an event has, or that of the events before."""
    return str(event.get("hypercast", {}).get("x_start_kind", before))
