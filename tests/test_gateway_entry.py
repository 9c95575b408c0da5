"""A request's record is in the ledger once, whatever becomes of the answers of Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.entry import Entry
from registry.api_key import SpendPeriod
from registry.errors import InvalidRecord, StateUnavailable
from registry.gpu_shares import request_ids
from registry.memory_state import MemoryState
from registry.redis_state import RedisState
from registry.state import UsageFilter
from registry.usage import GpuSlice, RequestRecord, RequestStatus
from tests.redis_fixture import RedisServer
from tests.registry_records import request
from tests.state_fixture import connected


class Wire:
    """Between a client and Redis; `cuts` times it closes a connection where a write is to be answered."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.cuts = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_unix_connection(self._target)
        try:
            while asked := await reader.read(1 << 16):
                to_redis.write(asked)
                answer = await from_redis.read(1 << 16)
                if self.cuts and b"EVAL" in asked and not answer.startswith(b"-NOSCRIPT"):
                    self.cuts -= 1
                    return
                writer.write(answer)
        finally:
            to_redis.close()
            writer.close()


@asynccontextmanager
async def wired(folder: Path) -> AsyncIterator[tuple[RedisServer, Wire, RedisState]]:
    """A ledger in Redis, over a wire that can be cut."""
    async with RedisServer(folder) as server:
        wire = Wire(server.url.removeprefix("unix://"))
        listener = await asyncio.start_unix_server(wire.serve, folder / "wire")
        async with listener, RedisState.connect(f"unix://{folder / 'wire'}") as state:
            yield server, wire, state


@pytest.mark.parametrize("cuts", [1, 2])
def test_a_record_whose_acknowledgement_is_lost_is_billed_once(tmp_path: Path, cuts: int) -> None:
    async def main() -> None:
        async with wired(tmp_path) as (_, wire, state):
            wire.cuts = cuts
            await Entry(request("mine"), ()).write(state)
            assert wire.cuts == 0
            # The same id once more, by another request of the client: that is billed too, once.
            wire.cuts = cuts
            await Entry(replace(request("mine"), received_at=1.5), ()).write(state)
            assert wire.cuts == 0
            records, _ = await state.requests(UsageFilter())
            assert sorted(r.request_id.partition("~")[0] for r in records) == ["mine", "mine"]
            (row,) = await state.report(UsageFilter())
            assert (row.requests, row.cost_nanos) == (2, 2 * 45_200)

    asyncio.run(main())


def test_a_record_whose_client_was_told_that_it_failed_costs_nothing_however_late_it_arrived(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with (
            RedisServer(tmp_path) as server,
            RedisState.connect(server.url, timeout_s=20) as state,
            RedisState.connect(server.url, timeout_s=1) as impatient,
        ):
            await Entry(request("used"), ()).write(state)
            entries = [Entry(request("mine"), ()), Entry(request("used", received_at=1.5), ())]
            await connected(impatient)
            server.pause()
            writes = [entry.write(impatient) for entry in entries]
            failed = await asyncio.gather(*writes, return_exceptions=True)
            assert [type(error) for error in failed] == [StateUnavailable] * 2
            for entry in entries:
                entry.unacknowledged()
            server.resume()
            # What lay in Redis' socket is carried out first: `ping` waits behind it.
            await state.ping()
            assert (await state.request("mine")).status is RequestStatus.OK
            for _ in range(2):
                for entry in entries:
                    await entry.write(state)
            records, _ = await state.requests(UsageFilter())
            assert [r.request_id.partition("~")[0] for r in records] == ["mine", "used", "used"]
            assert [r.status.value for r in records] == ["failed", "ok", "failed"]
            (row,) = await state.report(UsageFilter())
            assert (row.requests, row.cost_nanos, row.billed_gpu_ms) == (3, 45_200, 2700)
            assert await state.spent_nanos("k0", SpendPeriod.TOTAL, 0) == 45_200

    asyncio.run(main())


def test_a_write_that_waits_ends_with_its_caller(tmp_path: Path) -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_record_under_an_id_that_holds_rubbish_is_billed_under_another() -> None:
    class Rubbish(MemoryState):
        async def request(self, request_id: str) -> RequestRecord:
            raise InvalidRecord(f"{request_id} does not hold a RequestRecord")

    async def main() -> None:
        ledger = Rubbish()
        await ledger.add_request(request("mine", received_at=1.5))
        await Entry(request("mine"), ()).write(ledger)
        records, _ = await ledger.requests(UsageFilter())
        assert [r.request_id.partition("~")[0] for r in records] == ["mine", "mine"]

    asyncio.run(main())


def test_a_second_id_that_is_taken_too_is_replaced_by_another() -> None:
    async def main() -> None:
        state = MemoryState()
        # Its calls name the id that it gets where its own is taken.
        slices = (GpuSlice(call_id="mine/0-0a1b2c3d", instance_id="i", node="n", gpu_us=5),)
        mine = replace(request("mine"), gpu=slices)
        other = Entry(mine, ())
        for there in ("mine", request_ids("mine/0-0a1b2c3d")[1]):
            assert await state.add_request(replace(request("x"), request_id=there, tenant="other"))
        with pytest.raises(StateUnavailable, match="another request has the id"):
            await other.write(state)
        await other.write(state)
        rows = await state.report(UsageFilter())
        assert sum(row.requests for row in rows) == 3

    asyncio.run(main())
