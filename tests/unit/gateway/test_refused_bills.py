"""Records that the ledger refuses: kept in the outbox, reported, and not blocking others."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import openai
import pytest

from gateway.billing.outbox import Outbox
from gateway.billing.outbox_record import OutboxRecord
from gateway.core.contract import CallUsage
from registry.errors import InvalidRecord, StateUnavailable
from registry.memory.ledger import MemoryLedger
from registry.records.usage import GpuSlice, RequestRecord, RequestStatus
from registry.state import UsageFilter
from tests.fixtures.gateway_http import byte_tokenizer, gateway
from tests.fixtures.registry_records import request

REFUSALS = [
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
    InvalidRecord("it does not decode"),
    RuntimeError("nobody thought of this"),
]


class Choosy(MemoryLedger):
    """A ledger that raises an error for some records; `at_once`: before there is anything to wait for."""

    def __init__(self, error: Exception, *, at_once: bool = False) -> None:
        super().__init__()
        self.error = error
        self.at_once = at_once
        self.refused = {"poison"}
        self.asked: Counter[str] = Counter()

    def add_request(self, record: RequestRecord) -> Coroutine[Any, Any, bool]:
        self.asked[record.response_id] += 1
        if self.at_once and record.response_id in self.refused:
            raise self.error
        return self._add(record)

    async def _add(self, record: RequestRecord) -> bool:
        await asyncio.sleep(0)
        if record.response_id in self.refused:
            raise self.error
        return await super().add_request(record)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
async def test_a_record_that_is_refused_fails_its_request_and_is_billed_later(
    error: Exception, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        ledger = Choosy(error, at_once=at_once)
        async with gateway(ledger=ledger) as gw:
            await gw.add_function("coder", tokenizer=byte_tokenizer())
            biller = gw.services.biller
            with pytest.raises(openai.InternalServerError) as refused:
                await gw.openai().completions.create(
                    model="coder", prompt="x", max_tokens=2, extra_headers={"x-request-id": "poison"}
                )
            assert refused.value.code == "billing_failed" and refused.value.status_code == 503
            assert len(biller.outbox) == 1 and not gw.settled
            assert ledger.asked["poison"] == 1  # to try at once again is of no use
            assert "rejects its record" in caplog.text and str(error) in caplog.text
            await gw.openai().completions.create(
                model="coder", prompt="x", max_tokens=2, extra_headers={"x-request-id": "good"}
            )
            ledger.refused.clear()
            assert await biller.outbox.drain()
            (record,) = await ledger.requests_by_client_id("poison")
            assert (record.status, record.cost_nanos) == (RequestStatus.FAILED, 0)
            (good,) = await ledger.requests_by_client_id("good")
            assert good.status is RequestStatus.OK
            assert len(gw.settled) == 2


def _use(name: str) -> CallUsage:
    return CallUsage(gpu=GpuSlice(call_id=name, instance_id="i", node="n0", gpu_us=1), exact=True)


@pytest.mark.parametrize("error", [*REFUSALS, StateUnavailable("Redis refused: bad argument")])
async def test_a_poisoned_record_keeps_no_other_waiting(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        ledger = Choosy(error)
        settled: list[CallUsage] = []
        outbox = Outbox(ledger, settled.extend)
        for name in ("r0", "poison", "r1", "r2"):
            outbox.add(OutboxRecord(request(name), (_use(name),)))
        for _ in range(3):
            assert not await outbox.drain()
        assert [use.gpu.call_id for use in settled] == ["r0", "r1", "r2"] and len(outbox) == 1
        assert all(ledger.asked[name] == 1 for name in ("r0", "r1", "r2"))
        if not isinstance(error, StateUnavailable):
            assert caplog.text.count("rejects its record") == 1  # not in every round
        ledger.refused.clear()
        assert await outbox.drain() and len(outbox) == 0
        records, _ = await ledger.requests(UsageFilter())
        assert sorted(record.response_id for record in records) == ["poison", "r0", "r1", "r2"]


@pytest.mark.parametrize("error", [*REFUSALS, StateUnavailable("Redis refused: bad argument")])
async def test_the_last_try_reaches_all_that_are_behind_a_poisoned_record(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        ledger = Choosy(error)
        settled: list[CallUsage] = []
        outbox = Outbox(ledger, settled.extend)
        for name in ("poison", "r1", "r2"):
            outbox.add(OutboxRecord(request(name), (_use(name),)))
        await outbox.aclose()
        assert [use.gpu.call_id for use in settled] == ["r1", "r2"]
        (reported,) = [line for line in caplog.messages if line.startswith("never billed")]
        assert "request_id='poison'" in reported


async def test_the_spool_goes_on_after_any_error() -> None:
    ledger = Choosy(RuntimeError("nobody thought of this"))
    settled: asyncio.Queue[CallUsage] = asyncio.Queue()

    def note(uses: Sequence[CallUsage]) -> None:
        for use in uses:
            settled.put_nowait(use)

    outbox = Outbox(ledger, note)
    running = asyncio.create_task(outbox.run())
    outbox.add(OutboxRecord(request("poison"), (_use("poison"),)))
    outbox.add(OutboxRecord(request("r1"), (_use("r1"),)))
    assert (await settled.get()).gpu.call_id == "r1"
    ledger.refused.clear()
    outbox.add(OutboxRecord(request("r2"), (_use("r2"),)))
    assert {(await settled.get()).gpu.call_id for _ in range(2)} == {"poison", "r2"}
    assert not running.done()
    running.cancel()
