"""The archive: reports are the same before and after, and no kill loses or doubles a row."""

import asyncio
import hashlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api.blob_collector import BlobCollector
from registry import keys
from registry.accounting import usage_reader
from registry.accounting.row_order import LedgerKind
from registry.archive.archiver import LedgerArchiver
from registry.archive.erasure import TenantEraser
from registry.archive.lease import archive_lease
from registry.archive.writer import ArchiveWriter
from registry.clock import SystemClock
from registry.config.secrets import new_api_key
from registry.errors import Conflict, CorruptImage, InvalidRecord, StaleEpoch, StateUnavailable
from registry.records.api_key import KeyRole, SpendPeriod
from registry.records.archive import ArchiveFile
from registry.records.usage import RequestRecord, voided
from registry.redis.connections import ConnectionPool
from registry.redis.state import RedisState
from registry.state import UsageFilter
from tests.fixtures.archive import DAYS, FIRST_DAY, ORIGIN, Archive, archive, history, readings

IDS = tuple(f"q{index}" for index in range(0, 200, 17))


async def left_in_redis(whole: Archive) -> int:
    return sum([await whole.redis.count_rows(kind, float("inf")) for kind in LedgerKind])


async def agree(whole: Archive) -> None:
    assert await readings(whole.archived, IDS) == await readings(whole.memory, IDS)


async def test_reports_are_the_same_before_while_and_after_days_are_archived(
    redis_url: str, tmp_path: Path
) -> None:
    async with archive(redis_url, tmp_path) as whole:
        rows = history(1, 300)
        random.Random(2).shuffle(rows)
        await whole.add(*rows)
        await agree(whole)
        for day in range(1, DAYS + 2):
            await whole.move(FIRST_DAY + day)
            await agree(whole)
        assert await left_in_redis(whole) == 0
        index = await whole.archived.index()
        assert sum(file.rows for file in index.files) == len(rows)
        await whole.move()
        assert (await whole.archived.index()).files == index.files


class Killed(Exception):
    """Raised instead of a kill."""


class KilledAt:
    """A state that ends its process at the n-th change of the archive, before or after it happens."""

    def __init__(self, state: RedisState, number: int, *, after: bool) -> None:
        self._state = state
        self._left = number
        self._after = after

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._state, name)
        if name not in ("close_requests", "publish_file", "remove_rows"):
            return target

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise Killed
            result = await target(*args, **kwargs)
            if self._left == 0:
                raise Killed
            return result

        return call


@pytest.mark.parametrize("after", [False, True])
async def test_a_kill_at_any_change_loses_and_doubles_nothing(
    redis_url: str, tmp_path: Path, after: bool
) -> None:
    for number in range(1, 9):
        async with archive(redis_url, tmp_path / f"{number}") as whole:
            rows = history(number, 24, days=2)
            await whole.add(*rows)
            state: Any = KilledAt(whole.redis, number, after=after)
            killed = LedgerArchiver(state, whole.files, whole.clock)
            with pytest.raises(Killed):
                async for _ in killed.archive():
                    pass
            await agree(whole)
            await whole.move()
            await agree(whole)
            assert await left_in_redis(whole) == 0
            assert sum(file.rows for file in (await whole.archived.index()).files) == len(rows)


async def test_a_process_killed_while_it_archives_loses_and_doubles_nothing(
    redis_url: str, tmp_path: Path
) -> None:
    async with archive(redis_url, tmp_path) as whole:
        rows = history(5, 400, days=8)
        await whole.add(*rows)
        script = Path(__file__).parents[1] / "fixtures" / "archive_process.py"
        for _ in range(40):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(script), redis_url, str(tmp_path), repr(whole.clock.wall_s())),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )
            assert process.stdout is not None
            events = random.Random(len(rows) + _).randrange(1, 7)
            for _event in range(events):
                if not await process.stdout.readline():
                    break
            ended = process.returncode == 0
            if not ended:
                with suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
            await empty_lease(whole)
            if process.returncode == 0 or not await left_in_redis(whole):
                break
        await agree(whole)
        await whole.move()
        await agree(whole)
        assert await left_in_redis(whole) == 0
        assert sum(file.rows for file in (await whole.archived.index()).files) == len(rows)


async def empty_lease(whole: Archive) -> None:
    """End the lease of a killed archiver, which would expire after a minute."""
    connections = ConnectionPool(whole.url)
    await connections.call("DEL", keys.lease("ledger-archive"))
    await connections.aclose()


async def test_readers_and_an_archiver_at_once_agree(redis_url: str, tmp_path: Path) -> None:
    async with archive(redis_url, tmp_path) as whole:
        rows = history(3, 3000, days=6)
        await whole.add(*rows)
        wanted = await readings(whole.memory, IDS, page_rows=101)
        moving = asyncio.create_task(whole.move())
        rounds = 0
        while not moving.done() or rounds < 2:
            assert await readings(whole.archived, IDS, page_rows=101) == wanted
            rounds += 1
        await moving


async def test_late_rows_are_added_once_and_archived_with_the_next_run(
    redis_url: str, tmp_path: Path
) -> None:
    async with archive(redis_url, tmp_path) as whole:
        rows = history(4, 60)
        await whole.add(*rows[::2])
        await whole.move()
        await whole.add(*rows)  # those archived already change nothing
        await agree(whole)
        assert await whole.redis.count_rows(LedgerKind.REQUESTS, float("inf")) == sum(
            isinstance(row, RequestRecord) for row in rows[1::2]
        )
        await whole.move()
        await agree(whole)
        assert await left_in_redis(whole) == 0
        files = (await whole.archived.index()).files
        assert sum(file.rows for file in files) == len(rows)


async def test_a_record_of_a_closed_day_waits_while_the_archive_is_written(
    redis_url: str, tmp_path: Path
) -> None:
    async with archive(redis_url, tmp_path) as whole:
        (first, second, *_) = (row for row in history(6, 40) if isinstance(row, RequestRecord))
        await whole.add(first)
        await whole.move()
        with pytest.raises(StateUnavailable):  # a gateway with a wrong clock, or one without an archive
            await whole.redis.add_request(second)
        async with archive_lease(whole.redis, whole.clock):
            with pytest.raises(StateUnavailable):
                await whole.archived.add_request(second)
            with pytest.raises(Conflict):
                await whole.move()
        assert await whole.archived.add_request(second) is True
        assert await whole.archived.add_request(second) is False


async def test_a_record_is_voided_in_the_archive_too(redis_url: str, tmp_path: Path) -> None:
    async with archive(redis_url, tmp_path) as whole:
        rows = history(7, 60)
        await whole.add(*rows)
        requests = [row for row in rows if isinstance(row, RequestRecord)]
        early, late = requests[3], requests[-3]
        await whole.move(FIRST_DAY + 2)
        for record in (early, late):
            changed = msgspec.structs.replace(record, queue_ms=record.queue_ms + 1)
            for ledger in (whole.archived, whole.memory):
                assert not await ledger.void_request(changed)
                assert await ledger.void_request(record)
                assert not await ledger.void_request(record)
            assert await whole.archived.request(record.request_id) == voided(record)
        await agree(whole)
        spent = [await whole.redis.spent_nanos(key, SpendPeriod.TOTAL, ORIGIN) for key in ("k0", "k1")]
        left = [voided(one) if one in (early, late) else one for one in requests]
        assert spent == [sum(one.cost_nanos for one in left if one.key_id == key) for key in ("k0", "k1")]
        assert len(await whole.store.digests()) == len((await whole.archived.index()).files)


async def test_only_closed_days_are_archived(redis_url: str, tmp_path: Path) -> None:
    async with archive(redis_url, tmp_path) as whole:
        today = FIRST_DAY + 10
        with pytest.raises(InvalidRecord):
            await whole.move(today + 1)
        whole.clock.step_wall(1800 - 10)
        with pytest.raises(InvalidRecord):  # it ended less than an hour ago
            await whole.move(today)
        whole.clock.step_wall(1850)
        await whole.move(today)


async def test_a_file_that_is_not_what_was_written_is_not_published(redis_url: str, tmp_path: Path) -> None:
    async with archive(redis_url, tmp_path) as whole:
        await whole.add(*history(8, 40))
        before = await left_in_redis(whole)
        original = ArchiveWriter.close

        class Short(ArchiveWriter):
            """A writer that miscounts."""

            def close(self) -> ArchiveFile:
                return replace(original(self), rows=self.rows + 1)

        async with whole.files.writing(LedgerKind.REQUESTS, FIRST_DAY) as draft:
            rows = [row for row in history(8, 40) if isinstance(row, RequestRecord)]
            draft._writer = Short(LedgerKind.REQUESTS, FIRST_DAY, draft._path)
            await draft.add(rows)
            with pytest.raises(CorruptImage):
                await draft.store()
        assert await left_in_redis(whole) == before


@pytest.mark.parametrize("moved", [False, True])
async def test_a_deleted_tenant_is_in_no_row_and_the_sums_stay(
    redis_url: str, tmp_path: Path, moved: bool
) -> None:
    async with archive(redis_url, tmp_path) as whole:
        rows = history(9, 80)
        await whole.add(*rows)
        if moved:
            await whole.move(FIRST_DAY + 2)
        eraser = TenantEraser(whole.redis, whole.files, whole.clock)
        before = await whole.archived.report(UsageFilter())
        key = new_api_key("acme", KeyRole.CALLER, "one").key
        await whole.redis.put_key(key)
        with pytest.raises(InvalidRecord, match=key.id):
            await anext(eraser.erase("acme"))
        await whole.redis.replace_key(key, replace(key, revoked_at=1.0))
        partial = eraser.erase("acme")  # a run that ends early is continued under the same alias
        first_alias = (await anext(partial)).alias
        await partial.aclose()
        found = [step async for step in eraser.erase("acme")]
        assert {step.alias for step in found} <= {first_alias}
        after = await whole.archived.report(UsageFilter())
        names = [row.tenant.replace(first_alias, "acme") for row in after]
        assert sorted(
            (replace(row, tenant=name) for row, name in zip(after, names, strict=True)),
            key=lambda row: row.tenant,
        ) == sorted(before, key=lambda row: row.tenant)
        records, _ = await whole.archived.requests(UsageFilter(), limit=1000)
        assert len(records) == sum(isinstance(row, RequestRecord) for row in rows)
        for record in records:
            if record.tenant == first_alias:
                assert (record.key_id, record.client_request_id) == (first_alias, "")
            assert record.tenant != "acme"
        grouped = await usage_reader.grouped(whole.archived, UsageFilter(), ("function", "tenant"))
        assert grouped == [msgspec.to_builtins(row) for row in after]
        assert len(await whole.store.digests()) == len((await whole.archived.index()).files)
        for client in ("c0", "c1", "c2"):
            seen = await whole.archived.requests_by_client_id(client)
            assert seen and all(record.tenant != first_alias for record in seen)
        assert not [step async for step in eraser.erase("acme")]
        await whole.move()
        assert await whole.archived.report(UsageFilter()) == after


async def test_rows_stay_if_the_index_has_lost_their_file(redis_url: str, tmp_path: Path) -> None:
    """A failover to a replica that lags loses the publication, but not the rows."""
    async with archive(redis_url, tmp_path) as whole:
        await whole.add(*history(3, 40, days=1))
        before = await left_in_redis(whole)
        state: Any = KilledAt(whole.redis, 2, after=True)
        with pytest.raises(Killed):
            async for _ in LedgerArchiver(state, whole.files, whole.clock).archive():
                pass
        (file,) = (await whole.archived.index()).files
        await whole.redis._redis.call("DEL", keys.ARCHIVE)
        async with archive_lease(whole.redis, whole.clock) as lease:
            async for names in whole.files.names(file, 500):
                with pytest.raises(StaleEpoch):
                    await whole.redis.remove_rows(
                        lease.epoch, LedgerKind(file.kind), names, digest=file.digest
                    )
        assert await left_in_redis(whole) == before


async def test_a_clock_that_is_ahead_closes_no_day(redis_url: str, tmp_path: Path) -> None:
    async with archive(redis_url, tmp_path) as whole:
        whole.clock.step_wall(time.time() + 5 * 86_400 - whole.clock.wall_s())
        with pytest.raises(Conflict, match="clock is ahead"):
            await whole.move()
        assert (await whole.archived.index()).closed == float("-inf")


async def test_a_void_finds_a_record_that_is_in_both_places(redis_url: str, tmp_path: Path) -> None:
    async with archive(redis_url, tmp_path) as whole:
        rows = history(4, 30, days=1)
        await whole.add(*rows)
        state: Any = KilledAt(whole.redis, 2, after=True)
        with pytest.raises(Killed):
            async for _ in LedgerArchiver(state, whole.files, whole.clock).archive():
                pass
        await empty_lease(whole)
        record = next(row for row in rows if isinstance(row, RequestRecord) and row.cost_nanos)
        assert await whole.archived.void_request(record) and await whole.memory.void_request(record)
        await whole.move()
        await agree(whole)


async def test_a_sweep_leaves_files_that_no_index_names(redis_url: str, tmp_path: Path) -> None:
    async with archive(redis_url, tmp_path) as whole:
        await whole.add(*history(5, 30, days=1))
        await whole.move()
        stored = set(await whole.store.digests())
        other = hashlib.sha256(b"PAR0").hexdigest()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"PAR0"

        await whole.store.append(other, 0, pieces(), total=4)
        await whole.redis._redis.call("DEL", keys.ARCHIVE)
        collector = BlobCollector(
            *(whole.store, whole.memory, SystemClock()),
            grace_s=-1.0,
            is_kept=whole.files.is_archive,
        )
        assert await collector.sweep() == [other]
        assert set(await whole.store.digests()) == stored
