"""Admission under a key's limits, and the `x-ratelimit-…` headers."""

import math
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime

from starlette.requests import Request

from gateway.core.errors import RETRY_AFTER_MAX_S, TooMany
from gateway.core.request_context import RequestContext, request_context
from gateway.schemas.operations import Handler
from gateway.tenants.concurrency_leases import LEASE_TTL_S, ConcurrencyLeases
from gateway.tenants.cost_estimates import CostEstimate, CostEstimates, WorkBound
from gateway.tenants.state_health import HealthCheck
from registry.accounting.prices import DEFAULT_RATES
from registry.clock import Clock
from registry.errors import NotFound, StateUnavailable
from registry.records.api_key import ApiKey, SpendPeriod
from registry.records.function import FunctionVersion
from registry.records.quota import (
    ConcurrencyLease,
    RateLimitDecision,
    RateLimitOutcome,
    full_in_ms,
    money,
    period_end,
    remaining,
    retry_in_s,
)
from registry.state import QuotaState

Headers = tuple[tuple[bytes, bytes], ...]


class Quotas:
    """Cluster-wide admission of requests of keys with limits; other keys cost nothing here."""

    def __init__(
        self, state: QuotaState, leases: ConcurrencyLeases, health: HealthCheck, clock: Clock
    ) -> None:
        self._state = state
        self._leases = leases
        self._health = health
        self._clock = clock
        self._estimates = CostEstimates()

    def __repr__(self) -> str:
        return f"<Quotas {self._leases!r}>"

    @asynccontextmanager
    async def admit(self, context: RequestContext, limits: ApiKey | None = None) -> AsyncIterator[None]:
        """Hold a concurrency lease of the request's key. Raises TooMany, Unavailable, StateUnavailable.

        `limits` is the key by whose id and limits it counts, by default that of the request.
        """
        key = limits or context.caller
        if not key.limited:
            yield
            return
        self._health.require_alive()
        lease = ConcurrencyLease(key_id=key.id, id=secrets.token_hex(8))
        now = self._clock.wall_s()
        try:
            decision = await self._state.admit(key, lease.id, ttl_s=LEASE_TTL_S, now=now)
        except BaseException as error:
            # It is unknown whether the lease was granted.
            self._leases.add(lease)
            self._leases.release(lease)
            if isinstance(error, StateUnavailable):
                self._health.report(alive=False, reason=str(error))
            raise
        context.rate_headers = rate_headers(key, decision)
        if decision.outcome is not RateLimitOutcome.ADMITTED:
            raise refusal(key, decision, now, self._health.currency)
        self._leases.add(lease)
        context.lease = lease
        try:
            yield
        finally:
            self.release(context)

    def rated(self, handler: Handler) -> Handler:
        """Return a handler under the rate of requests of the keys, counted apart from their calls."""

        async def handle(request: Request) -> object:
            context = request_context(request.scope)
            limits = replace(
                context.caller,
                id=f"{context.caller.id}:reads",
                max_concurrent=None,
                tokens_per_minute=None,
                spend_limit_nanos=None,
            )
            async with self.admit(context, limits):
                return await handler(request)

        return handle

    async def reserve(self, context: RequestContext, version: FunctionVersion, work: WorkBound) -> None:
        """Reserve in the key's spend limit what the request may cost; its lease holds the reservation.

        Raises TooMany if the limit may be used up by requests in progress.
        """
        key, lease = context.caller, context.lease
        if key.spend_limit_nanos is None or lease is None:
            return
        estimate = self.estimate(version, work)
        nanos = 0 if estimate is None else estimate.parts.total
        try:
            reserved = await self._state.reserve(key, lease.id, nanos, now=self._clock.wall_s())
        except StateUnavailable as error:
            self._health.report(alive=False, reason=str(error))
            raise
        if not reserved:
            message = (
                f"what this key's requests in progress may cost is as much as is left of its spend limit "
                f"of {money(key.spend_limit_nanos)} {self._health.currency}: retry when they have ended"
            )
            raise TooMany(message, code="spend_limit_reserved", retry_after_s=1)

    def estimate(
        self, version: FunctionVersion, work: WorkBound, gpu_types: Callable[[], Collection[str]] = tuple
    ) -> CostEstimate | None:
        """Return what work of a version costs, None if it is free of charge.

        It is priced for the device that ran the version's last request; until one has, for the dearest of
        those that `gpu_types` returns, or else of all in the price table.
        """
        of = (version.function, version.version)
        gpu_type = self._estimates.gpu_type(of)
        devices = gpu_types() if gpu_type is None else (gpu_type,)
        rates = [] if devices else list(self._health.rates or DEFAULT_RATES)
        for device in devices:
            with suppress(NotFound):  # free of charge
                rates.append(self._health.rate(device))
        return self._estimates.estimate(of, work, rates)

    def learn(self, version: FunctionVersion, gpu_type: str, gpu_us: int, work: WorkBound) -> None:
        """Take the usage of a request that has ended into account for the next estimates."""
        self._estimates.learn((version.function, version.version), gpu_type, gpu_us, work)

    def release(self, context: RequestContext) -> None:
        """Release the lease of a request whose work is done, soon. Idempotent."""
        if context.lease is not None:
            self._leases.release(context.lease)

    async def wait_released(self, context: RequestContext) -> None:
        """Wait until the lease is released, so that the client may send its next request at once."""
        if context.lease is not None:
            await self._leases.wait_released(context.lease)


def refusal(key: ApiKey, decision: RateLimitDecision, now: float, currency: str) -> TooMany:
    """Return the error for a refused request; spend limits are in `currency`."""
    retry_s = max(1, math.ceil(min(retry_in_s(key, decision, now), RETRY_AFTER_MAX_S)))
    match decision.outcome:
        case RateLimitOutcome.SPENT:
            # OpenAI's clients retry a 429 by themselves unless this header forbids it.
            return TooMany(
                _spent_message(key, now, currency),
                code="insufficient_quota",
                retry_after_s=None if key.spend_period is SpendPeriod.TOTAL else retry_s,
                headers=(("x-should-retry", "false"),),
            )
        case RateLimitOutcome.BUSY:
            message = f"this key's limit of {key.max_concurrent} concurrent requests is reached"
            return TooMany(message, code="too_many_concurrent", retry_after_s=retry_s)
        case RateLimitOutcome.REQUESTS:
            message = f"this key's limit of {key.requests_per_minute} requests a minute is reached"
            return TooMany(message, code="rate_limit_exceeded", retry_after_s=retry_s)
        case _:
            message = f"this key's limit of {key.tokens_per_minute} tokens a minute is reached"
            return TooMany(message, code="rate_limit_exceeded", retry_after_s=retry_s)


def _spent_message(key: ApiKey, now: float, currency: str) -> str:
    amount = f"{money(key.spend_limit_nanos or 0)} {currency}"
    if key.spend_period is SpendPeriod.TOTAL:
        return f"this key's total spend limit of {amount} is reached; it never resets: have it raised"
    resets_at = datetime.fromtimestamp(period_end(key.spend_period, now), UTC)
    return (
        f"this key's spend limit of {amount} a {key.spend_period.value} is reached; "
        f"it resets at {resets_at:%Y-%m-%dT%H:%M:%SZ}"
    )


def rate_headers(key: ApiKey, decision: RateLimitDecision) -> Headers:
    """Return the `x-ratelimit-…` headers of a key with rate limits, as of the request's arrival."""
    return (
        *_headers_of(b"requests", key.requests_per_minute, decision.requests_used),
        *_headers_of(b"tokens", key.tokens_per_minute, decision.tokens_used),
    )


def _headers_of(what: bytes, limit: int | None, used: int) -> Iterator[tuple[bytes, bytes]]:
    if limit is None:
        return
    yield b"x-ratelimit-limit-" + what, b"%d" % limit
    yield b"x-ratelimit-remaining-" + what, b"%d" % remaining(limit, used)
    yield b"x-ratelimit-reset-" + what, duration_text(full_in_ms(limit, used)).encode()


def duration_text(milliseconds: int) -> str:
    """Return a duration as in OpenAI's headers: `20ms`, `7.66s`, `6m0s`, `1h2m3s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".")
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
