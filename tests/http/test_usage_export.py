"""/admin/usage/export over HTTP: whole exports in pages, of what may be seen, and none that is cut short."""

import asyncio
import csv
import io
import json
from decimal import Decimal
from urllib.parse import urlsplit

import httpx2
import pytest

from registry.errors import StateUnavailable
from registry.memory.state import MemoryState
from registry.records.usage import RequestRecord
from registry.state import ClusterConfig, UsageFilter
from tests.fixtures.gateway_http import gateway
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import request

EXPORT = "/admin/usage/export"
NOW = 1_700_000_000.0


async def add_requests(state: MemoryState, count: int, **changes: object) -> None:
    for number in range(count):
        changed = {"ended_at": NOW + number, "key_id": f"k{number % 3}", **changes}
        await state.add_request(request(f"{changes.get('tenant', 'acme')}-{number}", **changed))


async def test_focus_rows_add_up_to_the_report() -> None:
    async with gateway(state=MemoryState()) as gw, gw.http() as admin:
        await add_requests(gw.state, 450)  # three pages
        await add_requests(gw.state, 5, tenant="other", cost_nanos=1)
        answer = await admin.get(EXPORT, params={"provider": "ACME\nGPUs"})
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        report = (await admin.get("/admin/usage/report")).json()["rows"]
        for row in report:
            costs = [Decimal(one["BilledCost"]) for one in rows if one["BillingAccountId"] == row["tenant"]]
            assert sum(costs) * 10**9 == row["cost_nanos"]
        assert {row["ProviderName"] for row in rows} == {"ACME GPUs"}
        assert {row["SubAccountName"] for row in rows} == {"k0", "k1", "k2"}
        other = await admin.get(EXPORT, params={"tenant": "other", "since": NOW + 3})
        requests = [row for row in csv.DictReader(io.StringIO(other.text)) if row["SkuMeter"] == "Requests"]
        assert sum(int(row["x_RequestCount"]) for row in requests) == 2
        assert (await admin.get(EXPORT, params={"since": NOW * 2})).text.count("\n") == 1  # the head


async def test_events_are_lines_with_the_ids_of_their_requests() -> None:
    async with gateway(state=MemoryState()) as gw, gw.http() as admin:
        await gw.state.cluster_config(ClusterConfig(cluster_id="c0ffee", store_url="x"))
        await add_requests(gw.state, 3)
        answer = await admin.get(EXPORT, params={"format": "openmeter"})
        assert answer.headers["content-type"] == "application/x-ndjson"
        events = [json.loads(line) for line in answer.text.splitlines()]
        assert [event["id"] for event in events] == ["acme-0", "acme-1", "acme-2"]
        assert {(event["source"], event["specversion"]) for event in events} == {
            ("urn:hypercast:c0ffee", "1.0")
        }
        lago = (await admin.get(EXPORT, params={"format": "lago"})).text.splitlines()
        assert json.loads(lago[0])["transaction_id"] == "acme-0:requests" and len(lago) == 3 * 4


async def test_callers_export_their_own_tenant() -> None:
    async with gateway(state=MemoryState()) as gw, gw.http(gw.caller_key) as caller:
        await add_requests(gw.state, 2)
        await add_requests(gw.state, 2, tenant="other")
        text = (await caller.get(EXPORT)).text
        assert {row["BillingAccountId"] for row in csv.DictReader(io.StringIO(text))} == {"acme"}
        assert (await caller.get(EXPORT, params={"tenant": "other"})).status_code == 403
        for wrong in ("format=xml", "since=x", f"provider={'x' * 129}"):
            assert (await caller.get(f"{EXPORT}?{wrong}")).status_code == 422


class PagedLedger(MemoryState):
    """Each page waits until the test lets it go, and then fails if the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.reading: asyncio.Queue[str] = asyncio.Queue()
        self.go: asyncio.Queue[bool] = asyncio.Queue()

    async def requests(
        self, where: UsageFilter, *, limit: int = 1000, cursor: str = ""
    ) -> tuple[list[RequestRecord], str]:
        self.reading.put_nowait(cursor)
        if not await self.go.get():
            raise StateUnavailable("gone")
        return await super().requests(where, limit=limit, cursor=cursor)


async def test_an_export_that_fails_is_never_taken_for_a_whole_one() -> None:
    async with gateway(state=PagedLedger()) as gw, gw.http() as admin, asyncio.timeout(PATIENCE_S):
        ledger = gw.state
        assert isinstance(ledger, PagedLedger)
        await add_requests(ledger, 250)
        ledger.go.put_nowait(False)
        assert (await admin.get(EXPORT)).status_code == 503
        for ok in (True, False):
            ledger.go.put_nowait(ok)
        with pytest.raises(httpx2.RemoteProtocolError):
            await admin.get(EXPORT)


async def test_reports_have_their_turn_between_the_pages_of_an_export() -> None:
    async with gateway(state=PagedLedger()) as gw, gw.http() as admin, asyncio.timeout(PATIENCE_S):
        ledger = gw.state
        assert isinstance(ledger, PagedLedger)
        await add_requests(ledger, 250)
        export = asyncio.create_task(admin.get(EXPORT))
        await ledger.reading.get()
        summary = asyncio.create_task(admin.get("/admin/usage/report", params={"by": "day"}))
        more = [asyncio.create_task(admin.get(EXPORT)) for _ in range(2)]
        (refused,), (other,) = await asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result().status_code == 503  # two of a tenant at once
        for _ in range(2 + 2 + 2):
            ledger.go.put_nowait(True)
        assert {(await task).status_code for task in (export, summary, other)} == {200}
        assert (await export).text == (await other).text
        # The report was read before the second page of the export that had started.
        assert await ledger.reading.get() == ""


async def test_an_export_ends_with_its_client() -> None:
    async with gateway(state=PagedLedger()) as gw, gw.http() as admin, asyncio.timeout(PATIENCE_S):
        ledger = gw.state
        assert isinstance(ledger, PagedLedger)
        await add_requests(ledger, 250)
        at = urlsplit(gw.url)
        for _ in range(3):  # more than there may be at once
            _, client = await asyncio.open_connection(at.hostname, at.port)
            head = f"GET {EXPORT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gw.admin_key}\r\n\r\n"
            client.write(head.encode())
            await ledger.reading.get()
            client.close()
            await gw.services.limiter.wait_idle(PATIENCE_S)
        for _ in range(2):
            ledger.go.put_nowait(True)
        assert (await admin.get(EXPORT)).status_code == 200
