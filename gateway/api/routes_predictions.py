"""/predictions: calls that run later, their state, cancellation and the secret of their webhooks."""

import re
import secrets
from functools import cached_property

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.preferences import MAX_WAIT_S, preferred_wait_s
from gateway.core.errors import ApiError, Conflicting, TooMany, Unprocessable
from gateway.core.request_context import request_context
from gateway.core.settings import JobSettings
from gateway.http.limits import decode, read_body
from gateway.http.responses import json_response
from gateway.jobs.destinations import HookDestinations, checked_webhook, parse_destinations
from gateway.jobs.outcomes import cancelled
from gateway.jobs.predictions import entry_of, prediction_job_id, prediction_of
from gateway.jobs.signatures import secret_text, tenant_secret
from gateway.requests.services import Services
from gateway.schemas.jobs import (
    PREDICTION_NAME,
    Prediction,
    PredictionList,
    PredictionRequest,
    WebhookSecret,
)
from gateway.schemas.parameters import AFTER, PAGE_LIMIT, PREFER
from registry.errors import NotFound
from registry.records.job import Job, JobOutcome, JobSpec, JobStatus, Submission

_NAME = re.compile(PREDICTION_NAME)


class PredictionRoutes:
    """The handlers of predictions."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = msgspec.json.Decoder(PredictionRequest)

    @property
    def _settings(self) -> JobSettings:
        return self._services.settings.jobs

    @cached_property
    def _destinations(self) -> HookDestinations:
        return parse_destinations(self._settings.hook_allow)

    async def create(self, request: Request) -> Response:
        """Queue a call under an id of ours."""
        return await self._submit(request, secrets.token_hex(12))

    async def put(self, request: Request) -> Response:
        """Queue a call under the client's id, unless that is known."""
        return await self._submit(request, _name(request))

    async def list_predictions(self, request: Request) -> PredictionList:
        """Return the predictions of the tenant, the latest first, without input and output."""
        tenant, after = request_context(request.scope).caller.tenant, AFTER.read(request)
        try:
            jobs, more = await self._services.state.predictions(
                tenant,
                limit=PAGE_LIMIT.read(request),
                after=None if after is None else prediction_job_id(tenant, after),
            )
        except NotFound:
            raise Unprocessable(f"there is no entry {after!r}", param="after") from None
        data = [entry_of(job) for job in jobs]
        return PredictionList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=more,
        )

    async def get(self, request: Request) -> Prediction:
        """Return a prediction; with `Prefer: wait` once it has ended, or after that time."""
        job, wait_s = await self._job(request), preferred_wait_s(PREFER.read(request), default_s=0.0)
        if wait_s and not job.status.is_final:
            job = await self._services.job_events.wait_ended(job.spec.id, wait_s)
        return prediction_of(job)

    async def cancel(self, request: Request) -> Prediction:
        """Cancel a prediction; one that has ended stays as it is."""
        job = await self._job(request)
        now = self._services.clock.wall_s()
        outcome = JobOutcome(status=JobStatus.CANCELLED, status_code=cancelled().reply.status, ended_at=now)
        keep_s = self._settings.keep_s
        return prediction_of(await self._services.state.cancel_job(job.spec.id, outcome, b"", keep_s=keep_s))

    async def secret(self, request: Request) -> WebhookSecret:
        """Return the secret of the tenant's webhooks."""
        tenant = request_context(request.scope).caller.tenant
        newest = self._services.settings.secrets[0]
        return WebhookSecret(secret=secret_text(tenant_secret(newest, tenant)))

    async def _submit(self, request: Request, name: str) -> Response:
        context, settings = request_context(request.scope), self._settings
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits, limit_bytes=settings.body_bytes)
        payload = decode(body, self._decoder, limits)
        webhook = checked_webhook(payload.webhook, self._destinations)
        await self._services.functions.resolve(payload.model, context.caller)
        now = self._services.clock.wall_s()
        tenant = context.caller.tenant
        spec = JobSpec(
            id=prediction_job_id(tenant, name),
            request_id=context.request_id,
            name=name,
            tenant=tenant,
            key_id=context.caller.id,
            path=f"/functions/{payload.model}/invoke",
            model=payload.model,
            created_at=now,
            expires_at=now + settings.expire_s,
            webhook=webhook,
        )
        call = msgspec.json.encode(payload.input)
        submission = await self._services.state.submit_job(spec, call, settings.bounds)
        if submission in (Submission.FULL, Submission.TENANT_FULL):
            raise queue_full(submission)
        wait_s = preferred_wait_s(PREFER.read(request), default_s=MAX_WAIT_S)
        job = await self._services.job_events.wait_ended(spec.id, wait_s)
        if submission is Submission.EXISTS and (job.spec.model, job.body) != (payload.model, call):
            raise Conflicting(f"there is a prediction {name!r} with another model or input")
        return json_response(prediction_of(job), status=200 if job.status.is_final else 202)

    async def _job(self, request: Request) -> Job:
        name = _name(request)
        try:
            tenant = request_context(request.scope).caller.tenant
            return await self._services.state.job(prediction_job_id(tenant, name))
        except NotFound:
            raise ApiError(404, "not_found", f"there is no prediction {name!r}") from None


def queue_full(submission: Submission) -> TooMany:
    """Return the error of a call for which the queue has no room."""
    whose = "this tenant" if submission is Submission.TENANT_FULL else "all tenants"
    return TooMany(f"the queue holds too much of {whose}: retry later", code="queue_full", retry_after_s=10)


def _name(request: Request) -> str:
    name: str = request.path_params["prediction"]
    if not _NAME.fullmatch(name):
        raise ApiError(404, "not_found", "there is no prediction of that name")
    return name
