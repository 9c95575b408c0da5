"""The delivery of webhooks: at least once, signed, with retries, to destinations that are allowed."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import httpcore2

from gateway.core.settings import JobSettings
from gateway.http.drain import ServingPhase
from gateway.jobs.destinations import CheckedBackend, DestinationRefused, HookDestinations
from gateway.jobs.hook_messages import hook_message
from gateway.jobs.signatures import signed_headers, tenant_secret
from gateway.requests.services import Services
from rdmacast.aio.shielded import run_shielded
from registry.errors import RegistryError, StateUnavailable
from registry.records.hook import ClaimedHook
from registry.records.job import HookStatus, JobEvent, JobEventKind

_log = logging.getLogger("hypercast.gateway")

_GONE = 410  # the receiver wants no more of them
_CONNECT_S, _TOTAL_S = 5.0, 15.0
_LEASE_S = 20.0  # more than _TOTAL_S
_RETRY_S = 0.5  # after the shared state was unavailable
_RETURN_TIMEOUT_S = 2.0
_OUTCOMES = {
    HookStatus.DELIVERED: "delivered",
    HookStatus.WAITING: "retried",
    HookStatus.FAILED: "failed",
}
_MAX_ANSWER_BYTES = 1 << 16  # what is read of an answer


class HookSender:
    """The webhooks that this gateway delivers."""

    def __init__(
        self,
        services: Services,
        settings: JobSettings,
        destinations: HookDestinations,
    ) -> None:
        self._services = services
        self._settings = settings
        self._destinations = destinations
        self._retries_s = settings.hook_retries_s
        self._sending: Counter[str] = Counter()  # by tenant
        self._wake = asyncio.Event()
        self._rng = random.Random()

    def __repr__(self) -> str:
        return f"<HookSender {self._sending.total()} of {self._settings.hooks_at_once}>"

    async def run(self) -> None:
        """Deliver until cancelled."""
        pool = httpcore2.AsyncConnectionPool(
            max_connections=self._settings.hooks_at_once,
            max_keepalive_connections=0,
            network_backend=CheckedBackend(self._destinations),
        )
        with self._services.job_events.listening(self._on_events):
            async with pool, asyncio.TaskGroup() as group:
                while True:
                    self._wake.clear()
                    due_s = await self._claim(group, pool)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(due_s):
                            await self._wake.wait()

    def _on_events(self, events: Sequence[JobEvent]) -> None:
        if not events or any(event.kind is JobEventKind.HOOK for event in events):
            self._wake.set()

    async def _claim(self, group: asyncio.TaskGroup, pool: httpcore2.AsyncConnectionPool) -> float | None:
        most = self._settings.hooks_at_once
        while True:
            free = most - self._sending.total()
            if free <= 0 or self._services.limiter.phase is ServingPhase.DRAINING:
                return None
            crowding = [tenant for tenant, count in self._sending.items() if count >= most - most // 4]
            try:
                claims = await self._services.state.claim_hooks(free, ttl_s=_LEASE_S, without=crowding)
            except StateUnavailable:
                return _RETRY_S
            for hook in claims.hooks:
                self._sending[hook.tenant] += 1
                group.create_task(self._deliver(hook, pool), name=f"webhook {hook.id}")
            if len(claims.hooks) < free:
                return None if crowding else claims.due_in_s

    async def _deliver(self, hook: ClaimedHook, pool: httpcore2.AsyncConnectionPool) -> None:
        try:
            status, retry_in_s = await self._try(hook, pool)
            self._services.metrics.jobs.deliveries[_OUTCOMES[status],] += 1
            await self._end(hook, status, retry_in_s)
        except asyncio.CancelledError:
            await run_shielded(self._end(hook, HookStatus.WAITING, 0.0))
            raise
        except Exception:  # whatever it is, the other webhooks go on; this one is due again
            _log.exception("webhook of %s: try %d failed", hook.id, hook.attempt)
        finally:
            self._sending[hook.tenant] -= 1
            self._sending += Counter()  # drops zeros
            self._wake.set()

    async def _try(self, hook: ClaimedHook, pool: httpcore2.AsyncConnectionPool) -> tuple[HookStatus, float]:
        try:
            self._destinations.check_url(hook.url)
            async with asyncio.timeout(_TOTAL_S):
                answer = await self._post(hook, pool)
        except DestinationRefused as error:
            _log.warning("webhook of %s: refused: %s", hook.id, error)
            return HookStatus.FAILED, 0.0
        except (TimeoutError, OSError, httpcore2.NetworkError, httpcore2.TimeoutException) as error:
            reason = f"{type(error).__name__} {error}".strip()
        except (httpcore2.ProtocolError, httpcore2.UnsupportedProtocol) as error:
            reason = f"no HTTP: {error}"
        else:
            if 200 <= answer < 300:
                return HookStatus.DELIVERED, 0.0
            if answer == _GONE:
                return HookStatus.FAILED, 0.0
            reason = f"status {answer}"
        if hook.attempt > len(self._retries_s):
            _log.warning("webhook of %s: given up after %d tries: %s", hook.id, hook.attempt, reason)
            return HookStatus.FAILED, 0.0
        retry_in_s = self._retries_s[hook.attempt - 1] * self._rng.uniform(0.8, 1.2)
        _log.info("webhook of %s: %s, again in %.0f s", hook.id, reason, retry_in_s)
        return HookStatus.WAITING, retry_in_s

    async def _post(self, hook: ClaimedHook, pool: httpcore2.AsyncConnectionPool) -> int:
        """Send the message; return the status of the answer. Redirects are not followed."""
        settings = self._services.settings
        message_id, body = hook_message(hook.subject)
        secrets = [tenant_secret(secret, hook.tenant) for secret in settings.secrets]
        headers = {
            "content-type": "application/json",
            "user-agent": "Hypercast",
            **signed_headers(secrets, message_id, self._services.clock.wall_s(), body),
        }
        extensions = {
            "timeout": {"connect": _CONNECT_S, "read": _TOTAL_S, "write": _TOTAL_S, "pool": _TOTAL_S}
        }
        nbytes = 0
        async with pool.stream(
            "POST", hook.url, headers=list(headers.items()), content=body, extensions=extensions
        ) as answer:
            status: int = answer.status
            async for chunk in answer.aiter_stream():
                nbytes += len(chunk)
                if nbytes > _MAX_ANSWER_BYTES:
                    break
        return status

    async def _end(self, hook: ClaimedHook, status: HookStatus, retry_in_s: float) -> None:
        with suppress(TimeoutError, RegistryError):  # then it is due again when its lease is over
            async with asyncio.timeout(_RETURN_TIMEOUT_S):
                await self._services.state.end_hook(hook.id, hook.attempt, status, retry_in_s=retry_in_s)
