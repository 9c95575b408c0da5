"""Reads of the whole ledger over HTTP: they end with their client, and few of a tenant's wait."""

import asyncio
from urllib.parse import urlsplit

from registry.memory.state import MemoryState
from registry.records.usage import RequestRecord
from registry.state import UsageFilter
from tests.fixtures.gateway_http import gateway
from tests.fixtures.patience import PATIENCE_S

SUMMARY = "/admin/usage/summary"


class SlowLedger(MemoryState):
    """Reads of its requests last until the test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.began: asyncio.Queue[str | None] = asyncio.Queue()
        self.cut: asyncio.Queue[str | None] = asyncio.Queue()
        self.go = asyncio.Event()

    async def requests(
        self, where: UsageFilter, *, limit: int = 1000, cursor: str = ""
    ) -> tuple[list[RequestRecord], str]:
        self.began.put_nowait(cursor)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cut.put_nowait(cursor)
            raise
        return await super().requests(where, limit=limit, cursor=cursor)


async def test_a_read_ends_when_its_client_has_left() -> None:
    state = SlowLedger()
    async with gateway(state=state) as gw, gw.http() as admin, asyncio.timeout(PATIENCE_S):
        at = urlsplit(gw.url)
        _, client = await asyncio.open_connection(at.hostname, at.port)
        head = f"GET {SUMMARY} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gw.caller_key}\r\n\r\n"
        client.write(head.encode())
        await state.began.get()
        others = asyncio.create_task(admin.get(SUMMARY))
        client.close()
        await state.cut.get()
        await state.began.get()
        state.go.set()
        assert (await others).status_code == 200


async def test_of_a_tenant_few_reads_wait() -> None:
    state = SlowLedger()
    async with gateway(state=state) as gw, gw.http() as admin, gw.http(gw.caller_key) as caller:
        paths = (SUMMARY, "/admin/usage/report?by=day", "/admin/usage/report?since=1")
        async with asyncio.timeout(PATIENCE_S):
            first = asyncio.create_task(caller.get(SUMMARY))
            await state.began.get()
            own = [asyncio.create_task(caller.get(path)) for path in (*paths, *paths[:2])]
            (refused,), waiting = await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
            answer = refused.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert int(answer.headers["retry-after"]) > 0
            others = asyncio.create_task(admin.get(SUMMARY))
            # What is kept as sums is read at once.
            assert (await caller.get("/admin/usage/report")).status_code == 200
            state.go.set()
            assert {(await one).status_code for one in (first, others, *waiting)} == {200}
            assert (await caller.get(SUMMARY)).status_code == 200
