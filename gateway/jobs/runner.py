"""The jobs that this gateway runs: claimed from the queue, run as requests in the background, ended once.

What ends a job is fenced by its lease. The bill is made with the result and stored with it; then it is
written to the ledger, here or by the next gateway that claims the job.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from gateway.core.errors import ApiError, Unauthorized, translate
from gateway.core.request_context import DeferredBill, RequestContext
from gateway.core.settings import JobSettings
from gateway.http.disconnect import ConnectionEnd
from gateway.http.drain import ServingPhase
from gateway.jobs.outcomes import JobDelay, JobEnd, cancelled, expired, failed, lost_too_often, next_of
from gateway.requests.job_call import JobReply, error_reply
from gateway.requests.middleware import RequestMiddleware
from gateway.requests.services import Services
from rdmacast.aio.shielded import run_shielded
from registry.config.secrets import check_usable
from registry.errors import Conflict, KeyRefused, NotFound, RegistryError, StateUnavailable
from registry.records.job import ClaimedJob, JobEvent, JobEventKind, JobLease, JobOutcome, JobStatus
from registry.records.usage import RequestRecord, RequestStatus, voided

_log = logging.getLogger("hypercast.gateway")

_RENEWALS = 4  # per time to live of a lease
_RETRY_S = 0.5  # after the shared state was unavailable
_RETURN_TIMEOUT_S = 2.0  # for the jobs that a gateway returns when it stops
_SHARE = 4  # of its places one tenant gets all but every fourth

T = TypeVar("T")


class _RunningJob:
    """A job that runs here."""

    def __init__(self, claim: ClaimedJob) -> None:
        self.claim = claim
        self.end = ConnectionEnd(asyncio.get_running_loop())
        self.task: asyncio.Task[None] | None = None
        self.is_lost = False

    def lose(self) -> None:
        """End it without a trace: another attempt has the job."""
        self.is_lost = True
        if self.task is not None:
            self.task.cancel()


class JobRunner:
    """The runner of one gateway."""

    def __init__(self, services: Services, requests: RequestMiddleware, settings: JobSettings) -> None:
        self._services = services
        self._requests = requests
        self._settings = settings
        self._state = services.state
        self._running: dict[str, _RunningJob] = {}
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<JobRunner {len(self._running)} of {self._settings.at_once}>"

    async def run(self) -> None:
        """Run jobs until cancelled; those that have not ended then return to the queue."""
        if not self._settings.at_once:
            return
        with self._services.job_events.listening(self._on_events):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._renew(), name="job leases")
                while True:
                    self._wake.clear()
                    due_s = await self._claim(group)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(due_s):
                            await self._wake.wait()

    def _on_events(self, events: Sequence[JobEvent]) -> None:
        for event in events:
            if event.kind is JobEventKind.CANCELLING and event.id in self._running:
                self._running[event.id].end.set_lost()
        if not events or any(event.kind is JobEventKind.QUEUED for event in events):
            self._wake.set()

    async def _claim(self, group: asyncio.TaskGroup) -> float | None:
        """Start what this gateway has places for; return when to look again without an event."""
        while True:
            free = self._settings.at_once - len(self._running)
            if free <= 0 or self._services.limiter.phase is ServingPhase.DRAINING:
                return None
            try:
                claims = await self._state.claim_jobs(
                    free, ttl_s=self._settings.lease_s, without=self._crowding()
                )
            except StateUnavailable:
                return _RETRY_S
            for claim in claims.jobs:
                running = _RunningJob(claim)
                self._running[claim.spec.id] = running
                running.task = group.create_task(self._run(running), name=f"job {claim.spec.id}")
            if len(claims.jobs) < free:
                return claims.due_in_s

    def _crowding(self) -> list[str]:
        """Return the tenants that have their share of the places."""
        share = self._settings.at_once - self._settings.at_once // _SHARE
        tenants = Counter(running.claim.spec.tenant for running in self._running.values())
        return [tenant for tenant, count in tenants.items() if count >= share]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / _RENEWALS)
            leases = {running.claim.lease: running for running in self._running.values()}
            try:
                renewal = await self._state.renew_jobs(list(leases), ttl_s=self._settings.lease_s)
            except StateUnavailable:
                continue
            for lease in renewal.lost:
                leases[lease].lose()
            for lease in renewal.cancelling:
                leases[lease].end.set_lost()

    async def _run(self, running: _RunningJob) -> None:
        claim = running.claim
        try:
            if claim.bill is not None:
                await self._settle(claim.lease, claim.bill, DeferredBill())
            else:
                await self._execute(running)
        except asyncio.CancelledError:
            if not running.is_lost:
                await run_shielded(self._give_back(claim.lease))
                raise
            _log.info("job %s: attempt %d has lost its lease", claim.spec.id, claim.attempt)
        except Exception:  # whatever it is, the other jobs go on; the lease of this one expires
            _log.exception("job %s: attempt %d failed", claim.spec.id, claim.attempt)
        finally:
            del self._running[claim.spec.id]
            self._wake.set()

    async def _give_back(self, lease: JobLease) -> None:
        with suppress(TimeoutError, RegistryError):  # then it expires
            async with asyncio.timeout(_RETURN_TIMEOUT_S):
                await self._state.requeue_job(lease)

    async def _execute(self, running: _RunningJob) -> None:
        claim, clock = running.claim, self._services.clock
        started_at = clock.wall_s()
        context = RequestContext(
            request_id=claim.spec.request_id,
            received_at=started_at,
            received_s=clock.monotonic_s(),
            attempt=claim.attempt,
            bill=DeferredBill(),
        )
        unrunnable = self._unrunnable(claim, started_at)
        if unrunnable is not None:
            await self._end(claim, unrunnable, context, started_at)
            return
        try:
            key = await self._persistently(lambda: self._state.key(claim.spec.key_id))
            context.key = check_usable(key, started_at)
        except (KeyRefused, NotFound) as error:
            refused = Unauthorized(f"the key of the job is not valid any more: {error}")
            await self._end(claim, failed(refused), context, started_at)
            return
        try:
            async with self._services.quotas.admit(context):
                await self._after(running, await self._reply(running, context), context, started_at)
        except (ApiError, StateUnavailable) as error:  # not admitted
            known = translate(error, claim.spec.path)
            assert known is not None
            await self._after(running, error_reply(known), context, started_at)

    def _unrunnable(self, claim: ClaimedJob, now: float) -> JobEnd | None:
        if claim.cancelling:
            return cancelled()
        if claim.lost >= self._settings.max_lost:
            return lost_too_often(claim.lost)
        return expired() if now >= claim.spec.expires_at else None

    async def _reply(self, running: _RunningJob, context: RequestContext) -> JobReply:
        spec = running.claim.spec
        return await self._requests.run_job(
            spec.path, running.claim.body, context, running.end, limit_bytes=self._settings.result_bytes
        )

    async def _after(
        self, running: _RunningJob, reply: JobReply, context: RequestContext, started_at: float
    ) -> None:
        claim = running.claim
        step = next_of(reply, claim.spec, attempt=claim.attempt, now=self._services.clock.wall_s())
        if isinstance(step, JobEnd):
            await self._end(claim, step, context, started_at)
            return
        delay: JobDelay = step
        _log.info(
            "job %s: attempt %d: %s, again in %.1f s",
            claim.spec.id,
            claim.attempt,
            reply.code or reply.status,
            delay.seconds,
        )
        await self._persistently(lambda: self._state.requeue_job(claim.lease, delay_s=delay.seconds))

    async def _end(self, claim: ClaimedJob, end: JobEnd, context: RequestContext, started_at: float) -> None:
        """Store how the job has ended, with its bill, and write that to the ledger."""
        bill = context.bill
        assert bill is not None
        record = bill.record
        if record is not None and end.status is JobStatus.FAILED and record.status is RequestStatus.OK:
            record = voided(record)
        outcome = JobOutcome(
            status=end.status,
            status_code=end.reply.status,
            version=context.version,
            started_at=started_at,
            ended_at=self._services.clock.wall_s(),
        )
        stored = await self._persistently(
            lambda: self._state.finish_job(
                claim.lease, outcome, end.reply.body, keep_s=self._settings.keep_s, bill=record
            )
        )
        if not stored:
            _log.info("job %s: attempt %d has lost its lease", claim.spec.id, claim.attempt)
        elif record is not None:
            await self._settle(claim.lease, record, bill)

    async def _settle(self, lease: JobLease, record: RequestRecord, bill: DeferredBill) -> None:
        try:
            await self._persistently(lambda: self._services.biller.write_deferred(record, bill.uses))
        except Conflict as error:  # the ledger has a bill of this request: it is not written twice
            _log.error("job %s: %s", lease.id, error)
        await self._persistently(lambda: self._state.settle_job(lease, keep_s=self._settings.keep_s))

    async def _persistently(self, step: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a step that is repeated while the shared state is unavailable."""
        while True:
            try:
                return await step()
            except StateUnavailable:
                await asyncio.sleep(_RETRY_S * (0.5 + secrets.randbelow(1000) / 1000))
