"""From what a request's calls used to its record in the ledger."""

import asyncio
import dataclasses
import logging
import math
import secrets
from collections.abc import Sequence

from gateway.callrun import CallRun
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.pulse import Pulse
from registry.clock import Clock
from registry.errors import NotFound, StateUnavailable
from registry.function import FunctionVersion
from registry.messages import Compute, Generate
from registry.prices import DEFAULT_RATES, rate_for
from registry.state import Ledger
from registry.usage import Rate, RequestRecord, RequestStatus, cost_nanos

_log = logging.getLogger("hypercast.gateway")

_RETRY_AFTER_S = 5
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


class BillingFailed(ApiError):
    """The ledger did not take a record."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            503,
            "billing_failed",
            f"request {request_id} cannot be billed: the registry does not answer",
            retry_after_s=_RETRY_AFTER_S,
        )


def prompt_tokens(runs: Sequence[CallRun]) -> int:
    """Tokens of the prompts, each prompt once however many choices it has."""
    seen: set[int] = set()
    total = 0
    for run in runs:
        work = run.call.work
        match work:
            case Generate():
                if id(work.prompt_ids) not in seen:
                    seen.add(id(work.prompt_ids))
                    total += len(work.prompt_ids)
            case Compute():
                total += run.usage.prompt_tokens if run.usage else sum(map(len, work.token_ids))
            case _:
                total += run.usage.prompt_tokens if run.usage else 0
    return total


def completion_tokens(runs: Sequence[CallRun]) -> int:
    """Tokens generated; of a call that was cut short, those that came."""
    return sum(run.usage.completion_tokens if run.usage else run.tokens for run in runs)


def make_record(
    *,
    exchange: Exchange,
    version: FunctionVersion,
    runs: Sequence[CallRun],
    status: RequestStatus,
    ended_at: float,
    pulse: Pulse,
) -> RequestRecord | None:
    """The record of a request; None if no instance ever took it. A failed request costs nothing, but
    the accelerator time that it took is in its record."""
    assigned = [run.assigned for run in runs if run.assigned is not None]
    if not assigned:
        return None
    first = assigned[0]
    # Requests that share a step share its time; it is rounded up once, for the whole request.
    gpu_ms = -(-sum(run.gpu_us for run in runs) // 1000)
    tokens_in, tokens_out = prompt_tokens(runs), completion_tokens(runs)
    rate = _rate(first.gpu_type, pulse)
    price = cost_nanos(rate, gpu_ms, tokens_in, tokens_out)
    queue_ms = max((run.assigned.queue_ms for run in runs if run.assigned), default=0.0)
    return RequestRecord(
        request_id=exchange.request_id,
        tenant=exchange.caller.tenant,
        key_id=exchange.caller.id,
        function=version.function,
        version=version.version,
        status=status,
        start_kind=first.start_kind,
        node=first.node,
        gpu_type=first.gpu_type,
        gpu_count=first.gpu_count,
        received_at=exchange.received_at,
        started_at=min(ended_at, exchange.received_at + min(r.assigned_after_s for r in runs if r.assigned)),
        ended_at=ended_at,
        queue_ms=math.ceil(queue_ms),
        load_ms=math.ceil(max(a.load_ms for a in assigned)),
        exec_ms=math.ceil(max(run.exec_ms for run in runs)),
        billed_gpu_ms=gpu_ms,
        prompt_tokens=tokens_in,
        completion_tokens=tokens_out,
        rate_id=rate.id,
        cost_nanos=0 if status is RequestStatus.FAILED else price,
    )


def _rate(gpu_type: str, pulse: Pulse) -> Rate:
    """The rate in force; nothing is charged for a device that the price table does not know."""
    try:
        return rate_for(gpu_type, pulse.rates or DEFAULT_RATES)
    except NotFound:
        _log.warning("the price table has no rate for %s: not charged", gpu_type)
        return Rate(
            id="unpriced",
            gpu_type=gpu_type,
            gpu_second_nanos=0,
            request_nanos=0,
            prompt_mtoken_nanos=0,
            completion_mtoken_nanos=0,
        )


class Biller:
    """Writes records to the ledger, surely: a client that leaves does not stop the write."""

    def __init__(self, ledger: Ledger, pulse: Pulse, clock: Clock) -> None:
        self._ledger = ledger
        self._pulse = pulse
        self._clock = clock
        self._writes: set[asyncio.Task[None]] = set()

    async def settle(
        self,
        exchange: Exchange,
        version: FunctionVersion,
        runs: Sequence[CallRun],
        status: RequestStatus,
    ) -> None:
        """Write the request's record; returns once the ledger has it. Raises BillingFailed."""
        record = make_record(
            exchange=exchange,
            version=version,
            runs=runs,
            status=status,
            ended_at=max(self._clock.wall_s(), exchange.received_at),
            pulse=self._pulse,
        )
        if record is None:
            return
        write = asyncio.create_task(self._write(record), name=f"bill {record.request_id}")
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        await asyncio.shield(write)

    async def _write(self, record: RequestRecord) -> None:
        unsure = False  # a write that failed may have reached the ledger nevertheless
        for pause_s in (*_PAUSES_S, None):
            try:
                if await self._ledger.add_request(record) or (unsure and await self._is_there(record)):
                    self._pulse.note(alive=True)
                    return
                # The client used its request id before: this is another request, so it is billed too.
                record = dataclasses.replace(record, request_id=f"{record.request_id}~{secrets.token_hex(4)}")
                _log.info("request id used before, billed as %s", record.request_id)
                unsure = False
                await self._ledger.add_request(record)
            except StateUnavailable as error:
                unsure = True
                self._pulse.note(alive=False, reason=str(error))
            else:
                return
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        _log.error("not billed, the ledger does not answer: %r", record)
        raise BillingFailed(record.request_id)

    async def _is_there(self, record: RequestRecord) -> bool:
        try:
            return await self._ledger.request(record.request_id) == record
        except NotFound:
            return False

    async def aclose(self) -> None:
        """Wait for the writes under way."""
        await asyncio.gather(*self._writes, return_exceptions=True)
