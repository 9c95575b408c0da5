"""/v1/batches: files of calls that run in the background."""

import secrets
from functools import cached_property

import msgspec
from starlette.requests import Request

from gateway.api.bodies import read_text
from gateway.api.preferences import preferred_wait_s
from gateway.api.routes_files import own_file, page_of
from gateway.core.errors import ApiError, BadRequest, Conflicting, TooMany
from gateway.core.request_context import request_context
from gateway.core.settings import JobSettings
from gateway.http.limits import decode
from gateway.jobs.batch_view import batch_object
from gateway.jobs.destinations import HookDestinations, checked_webhook, parse_destinations
from gateway.requests.services import Services
from gateway.schemas.jobs import BatchList, BatchObject, CreateBatch
from gateway.schemas.parameters import AFTER, PAGE_LIMIT, PREFER
from registry.errors import NotFound
from registry.records.batch import (
    BATCH_TRANSITIONS,
    BatchCounts,
    BatchRecord,
    BatchStatus,
    FilePurpose,
)
from registry.records.job import HookStatus, Submission

_CANCEL_TRIES = 20


class BatchRoutes:
    """The handlers of batches. A tenant sees its own."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = msgspec.json.Decoder(CreateBatch)

    @property
    def _settings(self) -> JobSettings:
        return self._services.settings.jobs

    @cached_property
    def _destinations(self) -> HookDestinations:
        return parse_destinations(self._settings.hook_allow)

    async def create(self, request: Request) -> BatchObject:
        """Create a batch of a file."""
        limits, caller = self._services.settings.limits, request_context(request.scope).caller
        body = await read_text(request, limits)
        payload = decode(body, self._decoder, limits)
        webhook = checked_webhook(payload.webhook, self._destinations)
        file = await own_file(request, self._services, payload.input_file_id)
        if file.purpose is not FilePurpose.BATCH:
            raise BadRequest(f"the purpose of {file.id} must be 'batch'", param="input_file_id")
        now = self._services.clock.wall_s()
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=caller.tenant,
            key_id=caller.id,
            endpoint=payload.endpoint,
            input_file=file.id,
            completion_window=payload.completion_window,
            created_at=now,
            expires_at=now + self._settings.expire_s,
            metadata=payload.metadata,
            webhook=webhook,
        )
        submission = await self._services.state.put_batch(record, batches=self._settings.batches)
        if submission in (Submission.FULL, Submission.TENANT_FULL):
            message = (
                "there are too many batches, in all or of this tenant: those that ended are removed in time"
            )
            raise TooMany(message, code="batches_full", retry_after_s=60)
        return batch_object(record, BatchCounts(hook=HookStatus.WAITING if webhook else None))

    async def list_batches(self, request: Request) -> BatchList:
        """Return the batches of the tenant."""
        tenant = request_context(request.scope).caller.tenant
        found = await self._services.state.batches(tenant)
        entries = [(record.id, (record, counts)) for record, counts in found]
        page, more = page_of(entries, AFTER.read(request), PAGE_LIMIT.read(request))
        data = [batch_object(record, counts) for record, counts in page]
        return BatchList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=more,
        )

    async def get(self, request: Request) -> BatchObject:
        """Return a batch; with `Prefer: wait` once it has ended, or after that time."""
        record, counts = await self._own(request)
        wait_s = preferred_wait_s(PREFER.read(request), default_s=0.0)
        if wait_s and not record.status.is_final:
            record, counts = await self._services.job_events.wait_batch_ended(record.id, wait_s)
        return batch_object(record, counts)

    async def cancel(self, request: Request) -> BatchObject:
        """Cancel a batch that has not ended."""
        for _ in range(_CANCEL_TRIES):
            record, counts = await self._own(request)
            if record.status is BatchStatus.CANCELLING or record.status is BatchStatus.CANCELLED:
                return batch_object(record, counts)
            if BatchStatus.CANCELLING not in BATCH_TRANSITIONS[record.status]:
                raise Conflicting(f"the batch cannot be cancelled: it is {record.status.value}")
            times = {**record.times, BatchStatus.CANCELLING.value: self._services.clock.wall_s()}
            after = msgspec.structs.replace(record, status=BatchStatus.CANCELLING, times=times)
            if await self._services.state.replace_batch(record, after) is Submission.QUEUED:
                return batch_object(after, counts)
        raise Conflicting("the batch changes too often: retry")

    async def _own(self, request: Request) -> tuple[BatchRecord, BatchCounts]:
        wanted: str = request.path_params["batch"]
        try:
            found = await self._services.state.batch(wanted)
        except NotFound:
            found = None
        if found is None or found[0].tenant != request_context(request.scope).caller.tenant:
            raise ApiError(404, "not_found", f"there is no batch {wanted!r}")
        return found
