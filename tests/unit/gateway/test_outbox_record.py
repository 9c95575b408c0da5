"""A request's record is in the ledger once, whatever becomes of the answers of Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.billing.outbox_record import OutboxRecord
from registry.errors import Conflict, StateUnavailable
from registry.memory.state import MemoryState
from registry.records.api_key import SpendPeriod
from registry.records.usage import RequestStatus
from registry.redis.state import RedisState
from registry.state import UsageFilter
from tests.fixtures.redis import RedisServer
from tests.fixtures.registry_records import request
from tests.fixtures.state import connected


class Wire:
    """Between a client and Redis; `cuts` times it closes a connection where a write is to be answered."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.cuts = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_unix_connection(self._target)
        asked = b""

        async def ask() -> None:
            nonlocal asked
            while chunk := await reader.read(1 << 16):
                asked += chunk
                to_redis.write(chunk)
            to_redis.close()

        asking = asyncio.ensure_future(ask())
        try:
            while answer := await from_redis.read(1 << 16):
                if self.cuts and b"EVAL" in asked and not answer.startswith(b"-NOSCRIPT"):
                    self.cuts -= 1
                    return
                asked = b""
                writer.write(answer)
        finally:
            asking.cancel()
            to_redis.close()
            writer.close()


@asynccontextmanager
async def wired(folder: Path) -> AsyncIterator[tuple[RedisServer, Wire, RedisState]]:
    """Yield a ledger in Redis, over a wire that can be cut."""
    async with RedisServer(folder) as server:
        wire = Wire(server.url.removeprefix("unix://"))
        listener = await asyncio.start_unix_server(wire.serve, folder / "wire")
        connected = RedisState.connect(f"unix://{folder / 'wire'}", password=server.password)
        async with listener, connected as state:
            yield server, wire, state


@pytest.mark.parametrize("cuts", [1, 2])
async def test_a_record_whose_acknowledgement_is_lost_is_billed_once(tmp_path: Path, cuts: int) -> None:
    async with wired(tmp_path) as (_, wire, state):
        wire.cuts = cuts
        await OutboxRecord(request("mine"), ()).write(state)
        assert wire.cuts == 0
        # Another request with the same id of its client is billed too, once.
        wire.cuts = cuts
        await OutboxRecord(request("other", client_request_id="twice"), ()).write(state)
        assert wire.cuts == 0
        records, _ = await state.requests(UsageFilter())
        assert sorted(r.request_id for r in records) == ["mine", "other"]
        (row,) = await state.report(UsageFilter())
        assert (row.requests, row.cost_nanos) == (2, 2 * 45_200)


async def test_a_record_whose_client_was_told_that_it_failed_costs_nothing_however_late_it_arrived(
    tmp_path: Path,
) -> None:
    async with (
        RedisServer(tmp_path) as server,
        RedisState.connect(server.url, timeout_s=20) as state,
        RedisState.connect(server.url, timeout_s=1) as impatient,
    ):
        await OutboxRecord(request("used"), ()).write(state)
        entries = [OutboxRecord(request("mine"), ()), OutboxRecord(request("next"), ())]
        await connected(impatient)
        server.pause()
        writes = [entry.write(impatient) for entry in entries]
        failed = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(error) for error in failed] == [StateUnavailable] * 2
        for entry in entries:
            entry.void()
        server.resume()
        # What lay in Redis' socket is carried out first: `ping` waits behind it.
        await state.ping()
        assert (await state.request("mine")).status is RequestStatus.OK
        for _ in range(2):
            for entry in entries:
                await entry.write(state)
        records, _ = await state.requests(UsageFilter())
        assert {r.request_id: r.status.value for r in records} == {
            "mine": "failed",
            "used": "ok",
            "next": "failed",
        }
        (row,) = await state.report(UsageFilter())
        assert (row.requests, row.cost_nanos, row.billed_gpu_ms) == (3, 45_200, 2700)
        assert await state.spent_nanos("k0", SpendPeriod.TOTAL, 0) == 45_200


async def test_a_write_that_waits_ends_with_its_caller(tmp_path: Path) -> None:
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        server.pause()
        first = asyncio.ensure_future(state.add_request(request("first")))
        second = asyncio.ensure_future(state.add_request(request("second")))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(state.add_request(request("late")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # now it waits behind the write of the other two
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        server.resume()
        assert await first and await second
        await state.add_request(request("next"))
        records, _ = await state.requests(UsageFilter())
        assert sorted(r.request_id for r in records) == ["first", "next", "second"]


async def test_a_record_whose_id_another_holds_is_refused() -> None:
    state = MemoryState()
    assert await state.add_request(request("mine", received_at=1.5))
    with pytest.raises(Conflict):
        await OutboxRecord(request("mine"), ()).write(state)
    assert len((await state.requests(UsageFilter()))[0]) == 1
