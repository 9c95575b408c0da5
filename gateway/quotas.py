"""A key's limits at the door: who may begin a request, and the headers that tell how much is left."""

import math
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from gateway.errors import RETRY_AFTER_MAX_S, TooMany
from gateway.exchange import Exchange
from gateway.places import PLACE_TTL_S, Places
from gateway.pulse import Pulse
from registry.api_key import ApiKey
from registry.clock import Clock
from registry.errors import StateUnavailable
from registry.quota import Place, SpendLimit, Standing, Verdict, full_in_ms, remaining, retry_in_s
from registry.state import QuotaState

Headers = tuple[tuple[bytes, bytes], ...]


class Quotas:
    """Admits requests of keys with limits, for the cluster as a whole; other keys cost nothing here."""

    def __init__(self, state: QuotaState, places: Places, pulse: Pulse, clock: Clock) -> None:
        self._state = state
        self._places = places
        self._pulse = pulse
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Quotas {self._places!r}>"

    @asynccontextmanager
    async def admit(self, exchange: Exchange) -> AsyncIterator[None]:
        """Hold a place of the request's key. Raises TooMany, Unavailable, StateUnavailable."""
        key = exchange.caller
        if not key.limited:
            yield
            return
        self._pulse.require()
        place = Place(key_id=key.id, id=secrets.token_hex(8))
        now = self._clock.wall_s()
        try:
            standing = await self._state.admit(key, place.id, ttl_s=PLACE_TTL_S, now=now)
        except BaseException as error:
            # Nobody knows whether it was taken.
            self._places.hold(place)
            self._places.leave(place)
            if isinstance(error, StateUnavailable):
                self._pulse.note(alive=False, reason=str(error))
            raise
        exchange.rate_headers = rate_headers(key, standing)
        if standing.verdict is not Verdict.ADMITTED:
            raise refusal(key, standing, now)
        self._places.hold(place)
        exchange.place = place
        try:
            yield
        finally:
            self.leave(exchange)

    def leave(self, exchange: Exchange) -> None:
        """The request's work is done: give its place back, soon. Idempotent."""
        if exchange.place is not None:
            self._places.leave(exchange.place)

    async def left(self, exchange: Exchange) -> None:
        """Wait for the place to be back, so that whoever got the answer may ask again at once."""
        if exchange.place is not None:
            await self._places.left(exchange.place)


def refusal(key: ApiKey, standing: Standing, now: float) -> TooMany:
    """What a refused caller is told."""
    retry_s = max(1, math.ceil(min(retry_in_s(key, standing, now), RETRY_AFTER_MAX_S)))
    match standing.verdict:
        case Verdict.SPENT:
            limit = SpendLimit(key.spend_limit_nanos or 0, key.spend_period)
            # Clients of OpenAI repeat a 429 by themselves, unless told that it is no use.
            return TooMany(
                f"this key's spend limit of {limit} is reached",
                code="insufficient_quota",
                retry_after_s=retry_s,
                headers=(("x-should-retry", "false"),),
            )
        case Verdict.BUSY:
            message = f"this key may have {key.max_concurrent} requests under way at once"
            return TooMany(message, code="too_many_concurrent", retry_after_s=retry_s)
        case Verdict.REQUESTS:
            message = f"this key may make {key.requests_per_minute} requests a minute"
            return TooMany(message, code="rate_limit_exceeded", retry_after_s=retry_s)
        case _:
            message = f"this key may use {key.tokens_per_minute} tokens a minute"
            return TooMany(message, code="rate_limit_exceeded", retry_after_s=retry_s)


def rate_headers(key: ApiKey, standing: Standing) -> Headers:
    """The `x-ratelimit-…` headers of a key with rates, as it stood when the request came."""
    return (
        *_headers_of(b"requests", key.requests_per_minute, standing.requests_used),
        *_headers_of(b"tokens", key.tokens_per_minute, standing.tokens_used),
    )


def _headers_of(what: bytes, limit: int | None, used: int) -> Iterator[tuple[bytes, bytes]]:
    if limit is None:
        return
    yield b"x-ratelimit-limit-" + what, b"%d" % limit
    yield b"x-ratelimit-remaining-" + what, b"%d" % remaining(limit, used)
    yield b"x-ratelimit-reset-" + what, duration_text(full_in_ms(limit, used)).encode()


def duration_text(milliseconds: int) -> str:
    """A duration as OpenAI's headers give it: `20ms`, `7.66s`, `6m0s`, `1h2m3s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".")
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
