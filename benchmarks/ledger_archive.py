"""Fill the usage ledger day by day through its own writers, archive each day, and report over all of them.

A real Redis has the ledger, a local folder the archive. Each day gets its request records, and a GPU interval
for each hundred of them, and is archived at once; Redis's memory is read before and after. At the end, in
turns: the report of all days by function and tenant (sums in Redis), by tenant and day, the summary (both
from Parquet files), and single records. All sums are compared with those of the rows as they were written.
With --data-dir, which keeps Redis and archive, a run goes on where another stopped, so that the days may be
done in several runs.

example:
  python -m benchmarks.ledger_archive --days 30 --requests 166667 --data-dir /tmp/ledger --json archive.json
"""

import asyncio
import json
import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.harness.arguments import at_least, benchmark_parser, say
from benchmarks.harness.processes import Processes
from benchmarks.harness.records import Record, all_but, describe_run, recording, timed
from registry.accounting import usage_reader
from registry.accounting.usage_report import COLUMNS, amounts_of
from registry.archive.archive import LedgerArchive
from registry.clock import SystemClock
from registry.images.store import open_store
from registry.records.quota import DAY_S
from registry.records.usage import CallPart, GpuSlice, InstanceInterval, RequestRecord, RequestStatus
from registry.redis.connections import ConnectionPool
from registry.redis.embedded import EmbeddedRedis
from registry.redis.state import RedisState
from registry.state import UsageFilter, UsageRow

FIRST_DAY = 20_393  # 2025-11-01
WRITTEN_AT_ONCE = 4096
CALLS_OF_INTERVAL = 100
LAG_EVERY_S = 0.01
REDIS_START_S = 300.0
Row = RequestRecord | InstanceInterval


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger under test, and a connection to Redis for its memory."""

    state: RedisState
    archive: LedgerArchive
    redis: ConnectionPool

    async def redis_bytes(self) -> int:
        text = (await self.redis.call("INFO", "memory")).decode()
        found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return int(found["used_memory"])


def rows_of(day: int, requests: int) -> Iterator[Row]:
    """Yield the rows of one day, the same ones each time."""
    draw = random.Random(day)
    step_s = DAY_S / (requests + 1)
    name = f"chat-1-{day:08x}"
    calls: list[CallPart] = []
    from_at, earlier_us = float(day * DAY_S), 0
    for index in range(requests):
        ended_at = day * DAY_S + (index + 1) * step_s
        request_id, gpu_us = f"req-{draw.randbytes(12).hex()}", draw.randrange(100, int(step_s * 5e5))
        calls.append(CallPart(call_id=f"{request_id}/0", from_us=0, to_us=gpu_us, over=True))
        tokens = draw.randrange(1, 800)
        tenant = draw.randrange(40)
        yield RequestRecord(
            request_id=request_id,
            tenant=f"tenant-{tenant}",
            key_id=f"{tenant:08x}{draw.randrange(3):08x}",
            function=f"chat-{draw.randrange(5)}",
            version=1,
            status=RequestStatus.FAILED if draw.random() < 0.01 else RequestStatus.OK,
            start_kind="hot",
            node="node-0",
            gpu_type="h100",
            gpu_count=1,
            received_at=ended_at - 0.2,
            started_at=ended_at - 0.15,
            ended_at=ended_at,
            queue_ms=draw.randrange(50),
            load_ms=0,
            exec_ms=draw.randrange(1000),
            billed_gpu_ms=-(-gpu_us // 1000),
            prompt_tokens=tokens,
            completion_tokens=draw.randrange(200),
            rate_id="h100-001",
            cost_nanos=gpu_us * 700,
            gpu=(GpuSlice(call_id=f"{request_id}/0", instance_id=name, node="node-0", gpu_us=gpu_us),),
        )
        if len(calls) == CALLS_OF_INTERVAL or index == requests - 1:
            to_at = ended_at + step_s / 2
            busy_us = sum(call.to_us for call in calls)
            idle_us = round((to_at - from_at) * 1e6) - busy_us
            yield InstanceInterval(
                instance_id=name,
                function="chat-0",
                version=1,
                node="node-0",
                state="ready",
                from_at=from_at,
                to_at=to_at,
                gpu_count=1,
                busy_us=busy_us,
                idle_us=idle_us,
                epoch=day,
                final=index == requests - 1,
                earlier_us=earlier_us,
                calls=tuple(calls),
            )
            calls, from_at, earlier_us = [], to_at, earlier_us + busy_us + idle_us


async def write_day(ledger: Ledger, day: int, requests: int) -> Counter[str]:
    """Write a day's rows, unless an interrupted run did; return the sums of its requests."""
    sums: Counter[str] = Counter()
    closed = day * DAY_S < (await ledger.state.archive_index()).closed
    waiting: list[Awaitable[bool]] = []
    for row in rows_of(day, requests):
        if isinstance(row, RequestRecord):
            sums.update(dict(zip(COLUMNS, amounts_of(row), strict=True)))
            if not closed:
                waiting.append(ledger.state.add_request(row))
        elif not closed:
            waiting.append(ledger.state.add_interval(row))
        if len(waiting) >= WRITTEN_AT_ONCE:
            await asyncio.gather(*waiting)
            waiting.clear()
    await asyncio.gather(*waiting)
    return sums


@asynccontextmanager
async def longest_lag() -> AsyncIterator[list[float]]:
    """Yield a list that gets the longest turn of the event loop while the block runs, in seconds."""
    found = [0.0]

    async def watch() -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(LAG_EVERY_S)
            found[0] = max(found[0], time.perf_counter() - before_s - LAG_EVERY_S)

    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        watching.cancel()


async def one_day(ledger: Ledger, day: int, requests: int) -> Record:
    """Write and archive one day; return its figures."""
    began_s = time.perf_counter()
    sums = await write_day(ledger, day, requests)
    written_s = time.perf_counter()
    full_bytes = await ledger.redis_bytes()
    async with longest_lag() as lag:
        async for _ in ledger.archive.archiver.archive(float((day + 1) * DAY_S)):
            pass
    files = [file for file in (await ledger.archive.ledger.index()).files if file.day == day]
    return {
        "day": day,
        "sums": dict(sums),
        "rows": sum(file.rows for file in files),
        "archive_bytes": sum(file.nbytes for file in files),
        "write_s": written_s - began_s,
        "archive_s": time.perf_counter() - written_s,
        "loop_lag_s": lag[0],
        "redis_bytes_full": full_bytes,
        "redis_bytes_after": await ledger.redis_bytes(),
        "rss_bytes": psutil.Process().memory_info().rss,
    }


async def timings(call: Callable[[], Awaitable[Any]], rounds: int) -> tuple[list[float], Any]:
    seconds, found = [], None
    for _ in range(rounds):
        began_s = time.perf_counter()
        found = await call()
        seconds.append(time.perf_counter() - began_s)
    return seconds, found


def summed(rows: list[Any]) -> dict[str, int]:
    fields = [
        row if isinstance(row, dict) else {name: getattr(row, name) for name in COLUMNS} for row in rows
    ]
    return {name: sum(row[name] for row in fields) for name in COLUMNS}


async def reports(ledger: Ledger, days: list[Record], args: Namespace, params: Record) -> list[Record]:
    """Read all days in several ways; return a record for each."""
    whole, where = (
        ledger.archive.ledger,
        UsageFilter(since=FIRST_DAY * DAY_S, until=(FIRST_DAY + len(days)) * DAY_S),
    )
    expected = {name: sum(day["sums"][name] for day in days) for name in COLUMNS}
    some = [row.request_id for row in rows_of(FIRST_DAY, 100) if isinstance(row, RequestRecord)][:20]
    found: list[Record] = []

    async def measure(name: str, call: Callable[[], Awaitable[Any]], sums: bool = True) -> None:
        async with longest_lag() as lag:
            seconds, rows = await timings(call, args.rounds)
        right = {"sums_equal": summed(rows) == expected} if sums else {}
        rss = psutil.Process().memory_info().rss
        found.append(timed(name, params, seconds, **right, loop_lag_s=lag[0], rss_bytes=rss, rows=len(rows)))

    async def rows() -> list[UsageRow]:
        return await whole.report(where)

    async def by_day() -> list[Any]:
        return await usage_reader.grouped(whole, where, ("tenant", "day"))

    async def cut() -> list[UsageRow]:
        assert where.since is not None and where.until is not None
        return await whole.report(UsageFilter(since=where.since - 5000, until=where.until + 5000))

    async def summary() -> list[Any]:
        return await usage_reader.summary(whole, where)

    async def show() -> list[Any]:
        return [await whole.requests_by_id([name]) for name in some]

    await measure("report by function,tenant", rows)
    await measure("report by function,tenant, days cut", cut)
    await measure("report by tenant,day", by_day)
    await measure("summary", summary)
    await measure("20 x show", show, sums=False)
    return found


async def run(args: Namespace, folder: Path) -> list[Record]:
    """Write and archive the days that are missing, and report where all are there."""
    params = {**all_but(args), **describe_run("benchmarks.ledger_archive")}
    progress = folder / "days.json"
    days: list[Record] = json.loads(progress.read_text()) if progress.exists() else []
    embedded = EmbeddedRedis(folder)
    embedded.prepare()
    with Processes() as processes:
        server = processes.start(embedded.command())
        await embedded.wait_ready(REDIS_START_S)
        async with RedisState.connect(embedded.url, timeout_s=30.0) as state:
            archive = LedgerArchive.open(state, open_store(str(folder / "store")), SystemClock())
            redis = ConnectionPool(embedded.url)
            ledger = Ledger(state, archive, redis)
            until_s = time.monotonic() + args.seconds
            while len(days) < args.days and time.monotonic() < until_s:
                days.append(await one_day(ledger, FIRST_DAY + len(days), args.requests))
                progress.write_text(json.dumps(days))
                say(shown_day(days[-1]))
            found = [archived(days, args, params)]
            if len(days) == args.days:
                found += await reports(ledger, days, args, params)
            await archive.aclose()
            await redis.aclose()
        processes.stop(server, 60.0)
    return found


def archived(days: list[Record], args: Namespace, params: Record) -> Record:
    """Return the record of writing and archiving."""
    requests = sum(day["sums"]["requests"] for day in days)
    figures = timed("archive a day", params, [day["archive_s"] for day in days])
    return figures | {
        "days": len(days),
        "requests": requests,
        "rows": sum(day["rows"] for day in days),
        "archive_bytes": sum(day["archive_bytes"] for day in days),
        "write_s": sum(day["write_s"] for day in days),
        "loop_lag_s": max(day["loop_lag_s"] for day in days),
        "rss_bytes": max(day["rss_bytes"] for day in days),
        "redis_bytes_full": [day["redis_bytes_full"] for day in days],
        "redis_bytes_after": [day["redis_bytes_after"] for day in days],
    }


def shown_day(day: Record) -> str:
    return (
        f"day {day['day']}: {day['rows']} rows, written in {day['write_s']:.1f} s, archived in "
        f"{day['archive_s']:.1f} s, Redis {day['redis_bytes_full'] / 2**20:.0f} -> "
        f"{day['redis_bytes_after'] / 2**20:.1f} MiB, {day['archive_bytes'] / day['rows']:.0f} bytes a row"
    )


def show(row: Record) -> str:
    """Format a record as one line."""
    if "requests" in row:
        return (
            f"{row['requests']} requests of {row['days']} days: Redis at most "
            f"{max(row['redis_bytes_full']) / 2**20:.0f} MiB, "
            f"at last {row['redis_bytes_after'][-1] / 2**20:.1f}"
        )
    sums = {True: "sums equal", False: "SUMS DIFFER"}.get(row.get("sums_equal"), "")  # type: ignore[arg-type]
    return f"{row['name']:36} {row['median_s'] * 1e3:9.1f} ms  lag {row['loop_lag_s'] * 1e3:.0f} ms  {sums}"


def main() -> None:
    parser = benchmark_parser("benchmarks.ledger_archive", __doc__)
    parser.add_argument("--days", type=at_least(1), default=5, help="days")
    parser.add_argument("--requests", type=at_least(1), default=10_000, help="requests of a day")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="rounds of each report")
    parser.add_argument("--seconds", type=at_least(1), default=10**6, help="begin no further day after this")
    parser.add_argument("--data-dir", type=Path, help="keep Redis and archive here, and go on with them")
    args = parser.parse_args()
    with recording("ledger-archive", json=args.json, show=show) as out:
        if args.data_dir is not None:
            args.data_dir.mkdir(parents=True, exist_ok=True)
            out.add(*asyncio.run(run(args, args.data_dir)))
            return
        with TemporaryDirectory(prefix="hypercast-archive-") as folder:
            out.add(*asyncio.run(run(args, Path(folder))))


if __name__ == "__main__":
    main()
