"""What every State promises of jobs, files and batches: the one in Redis and the one in memory."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from registry.errors import NotFound
from registry.records.batch import BatchCounts, BatchRecord, BatchStatus, FilePart, FilePurpose, FileRecord
from registry.records.hook import EndedBatch
from registry.records.job import (
    ClaimedJob,
    HookStatus,
    Job,
    JobBounds,
    JobEvent,
    JobEventKind,
    JobLease,
    JobOutcome,
    JobSpec,
    JobStatus,
    Submission,
)
from registry.records.job_counts import JobCounts
from registry.redis.state import RedisState
from registry.state import State
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.redis import RedisServer
from tests.fixtures.registry_records import NOW
from tests.fixtures.registry_records import request as bill

BOUNDS = JobBounds()
TTL_S, SHORT_S, KEEP_S = 60.0, 0.03, 3600.0
GOOD = JobOutcome(status=JobStatus.SUCCEEDED, status_code=200, ended_at=NOW)
BAD = JobOutcome(status=JobStatus.FAILED, status_code=500, ended_at=NOW)
STOPPED = JobOutcome(status=JobStatus.CANCELLED, ended_at=NOW)


def spec(name: str = "j0", tenant: str = "acme", **changes: Any) -> JobSpec:
    record = JobSpec(
        id=name,
        request_id=f"req-{name}",
        name=name,
        tenant=tenant,
        key_id="k0",
        path="/functions/echo/invoke",
        model="echo",
        created_at=NOW,
        expires_at=NOW + 3600,
    )
    return msgspec.structs.replace(record, **changes)


async def submit(state: State, *names: str, tenant: str = "acme", **changes: Any) -> None:
    for name in names:
        queued = await state.submit_job(spec(name, tenant, **changes), b'{"n":1}', BOUNDS)
        assert queued is Submission.QUEUED


async def claim(state: State, limit: int = 1, ttl_s: float = TTL_S) -> list[ClaimedJob]:
    """Claim until there are so many: a lease of another, or a delay, may have to end first."""
    found: list[ClaimedJob] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < limit:
            claims = await state.claim_jobs(limit - len(found), ttl_s=ttl_s)
            found += claims.jobs
            if len(found) < limit:
                await until_due(claims.due_in_s)
    return found


async def until_due(due_in_s: float | None) -> None:
    """Wait as a gateway does: the end of a lease or of a delay is no event, the state says when it is."""
    assert due_in_s is not None
    await asyncio.sleep(due_in_s + 0.001)


async def names(state: State, limit: int, without: tuple[str, ...] = ()) -> list[str]:
    claims = await state.claim_jobs(limit, ttl_s=TTL_S, without=without)
    return [job.spec.id for job in claims.jobs]


async def test_a_job_is_run_once_in_order_and_kept_with_its_result(state: State) -> None:
    await submit(state, "a", "b")
    assert await state.submit_job(spec("a"), b"{}", BOUNDS) is Submission.EXISTS
    assert (await state.job("a")).status is JobStatus.QUEUED
    first, second = await claim(state, 2)
    assert [first.spec.id, second.spec.id] == ["a", "b"]
    assert (first.body, first.attempt, first.lost, first.bill) == (b'{"n":1}', 1, 0, None)
    assert await names(state, 5) == []
    running = await state.job("a")
    assert running.status is JobStatus.RUNNING and running.started_at is not None
    assert await state.finish_job(first.lease, GOOD, b'{"x":2}', keep_s=KEEP_S)
    ended = await state.job("a")
    assert (ended.status, ended.outcome, ended.result) == (JobStatus.SUCCEEDED, GOOD, b'{"x":2}')
    assert await state.finish_job(first.lease, GOOD, b'{"x":2}', keep_s=KEEP_S)  # repeated: no other end
    assert not await state.finish_job(first.lease, BAD, b"{}", keep_s=KEEP_S)
    with pytest.raises(NotFound):
        await state.job("c")


async def test_tenants_take_turns_and_predictions_go_before_lines_of_batches(state: State) -> None:
    await state.put_batch(batch(), batches=100)
    lines = [(spec(f"l{i}", batch="b0", line=i), b"{}") for i in range(3)]
    assert await state.replace_batch(batch(), running(3), lines=lines) is Submission.QUEUED
    await submit(state, "a0", "a1", "a2")
    await submit(state, "x0", "x1", tenant="beta")
    order = await names(state, 20)
    assert [name for name in order if name[0] in "al"] == ["a0", "a1", "a2", "l0", "l1", "l2"]
    assert sorted(order[:2]) == ["a0", "x0"] and sorted(order[2:4]) == ["a1", "x1"]


async def test_tenants_with_enough_are_passed_over(state: State) -> None:
    await submit(state, "a0", "a1")
    await submit(state, "x0", tenant="beta")
    assert await names(state, 5, ("acme",)) == ["x0"]
    assert await names(state, 5) == ["a0", "a1"]


async def test_a_lost_lease_returns_its_job_and_fences_the_attempt(state: State) -> None:
    await submit(state, "a")
    (lost,) = await claim(state, ttl_s=SHORT_S)
    (again,) = await claim(state)
    assert (again.spec, again.attempt, again.lost) == (lost.spec, 2, 1)
    assert not await state.finish_job(lost.lease, GOOD, b"1", keep_s=KEEP_S)
    assert not await state.requeue_job(lost.lease)
    assert (await state.renew_jobs([lost.lease, again.lease], ttl_s=TTL_S)).lost == (lost.lease,)
    assert await state.finish_job(again.lease, GOOD, b"2", keep_s=KEEP_S)
    assert (await state.job("a")).result == b"2"
    assert not await state.finish_job(JobLease("nothing", 1), GOOD, b"", keep_s=KEEP_S)


async def test_a_renewed_lease_lasts(state: State) -> None:
    await submit(state, "a")
    (held,) = await claim(state, ttl_s=1.0)
    assert (await state.renew_jobs([held.lease], ttl_s=TTL_S)).lost == ()
    claims = await state.claim_jobs(1, ttl_s=TTL_S)
    assert claims.jobs == () and claims.due_in_s is not None and claims.due_in_s > 30
    assert await state.renew_jobs([], ttl_s=TTL_S) == await state.renew_jobs([held.lease], ttl_s=TTL_S)


async def test_a_job_that_has_to_wait_is_run_later(state: State) -> None:
    await submit(state, "a")
    (first,) = await claim(state)
    assert await state.requeue_job(first.lease, delay_s=SHORT_S)
    (later,) = await claim(state)
    assert (later.attempt, later.lost) == (2, 0)
    assert await state.requeue_job(later.lease)
    assert [job.attempt for job in (await state.claim_jobs(1, ttl_s=TTL_S)).jobs] == [3]


async def test_a_bill_is_stored_with_the_result_and_settled_once(state: State) -> None:
    await submit(state, "a")
    record = bill("req-a")
    (ran,) = await claim(state, ttl_s=SHORT_S)
    assert await state.finish_job(ran.lease, GOOD, b"1", keep_s=KEEP_S, bill=record)
    assert (await state.job("a")).status is JobStatus.BILLING
    (settling,) = await claim(state)  # its gateway died before the ledger had the bill
    assert (settling.bill, settling.attempt, settling.lost) == (record, 2, 0)
    assert not await state.settle_job(ran.lease, keep_s=KEEP_S)
    assert await state.settle_job(settling.lease, keep_s=KEEP_S)
    assert await state.settle_job(settling.lease, keep_s=KEEP_S)
    ended = await state.job("a")
    assert (ended.status, ended.result) == (JobStatus.SUCCEEDED, b"1")
    assert await names(state, 1) == []


async def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_by_its_gateway(state: State) -> None:
    await submit(state, "a", "b")
    (ran,) = await claim(state)
    cancelled = await state.cancel_job("b", STOPPED, b"{}", keep_s=KEEP_S)
    assert (cancelled.status, cancelled.outcome) == (JobStatus.CANCELLED, STOPPED)
    assert not (await state.cancel_job("a", STOPPED, b"{}", keep_s=KEEP_S)).status.is_final
    assert (await state.renew_jobs([ran.lease], ttl_s=TTL_S)).cancelling == (ran.lease,)
    assert await state.finish_job(ran.lease, STOPPED, b"{}", keep_s=KEEP_S)
    assert (await state.cancel_job("a", BAD, b"", keep_s=KEEP_S)).outcome == STOPPED
    assert await names(state, 5) == []
    with pytest.raises(NotFound):
        await state.cancel_job("c", STOPPED, b"", keep_s=KEEP_S)


async def test_the_next_attempt_of_a_job_that_was_being_cancelled_finds_that(state: State) -> None:
    await submit(state, "a")
    await claim(state, ttl_s=SHORT_S)
    await state.cancel_job("a", STOPPED, b"", keep_s=KEEP_S)
    (again,) = await claim(state)
    assert again.cancelling


async def test_jobs_and_their_bytes_are_bounded_in_all_and_by_tenant(state: State) -> None:
    few = JobBounds(jobs=4)
    outcomes = [await state.submit_job(spec(f"a{i}"), b"{}", few) for i in range(3)]
    assert outcomes == [Submission.QUEUED, Submission.QUEUED, Submission.TENANT_FULL]
    for tenant in ("b", "c"):
        assert await state.submit_job(spec(tenant, tenant), b"{}", few) is Submission.QUEUED
    assert await state.submit_job(spec("d", "d"), b"{}", few) is Submission.FULL
    small = JobBounds(job_bytes=10_000)
    assert await state.submit_job(spec("big", "e"), b"x" * 6000, small) is Submission.TENANT_FULL
    assert await state.submit_job(spec("bigger", "e"), b"x" * 20_000, small) is Submission.FULL


async def test_what_is_removed_makes_room(state: State) -> None:
    one = JobBounds(jobs=2)
    assert await state.submit_job(spec("a"), b"{}", one) is Submission.QUEUED
    (ran,) = await claim(state)
    assert await state.finish_job(ran.lease, GOOD, b"{}", keep_s=SHORT_S)
    assert await state.submit_job(spec("b"), b"{}", one) is Submission.TENANT_FULL
    await until_due((await state.claim_jobs(1, ttl_s=TTL_S)).due_in_s)
    assert (await state.claim_jobs(1, ttl_s=TTL_S)).due_in_s is None
    with pytest.raises(NotFound):
        await state.job("a")
    assert await state.submit_job(spec("b"), b"{}", one) is Submission.QUEUED


async def test_a_webhook_is_due_until_it_is_delivered_or_given_up(state: State) -> None:
    await submit(state, "a", webhook="https://example.com/hook")
    assert (await state.claim_hooks(5, ttl_s=TTL_S)).hooks == ()
    assert (await state.job("a")).hook is HookStatus.WAITING
    (ran,) = await claim(state)
    await state.finish_job(ran.lease, GOOD, b"1", keep_s=KEEP_S)
    (first,) = (await state.claim_hooks(5, ttl_s=SHORT_S)).hooks
    assert isinstance(first.subject, Job) and (first.id, first.tenant) == ("a", "acme")
    assert (first.attempt, first.subject.result) == (1, b"1")
    assert first.subject.status is JobStatus.SUCCEEDED
    async with asyncio.timeout(PATIENCE_S):  # its gateway died
        while not (claims := await state.claim_hooks(5, ttl_s=TTL_S)).hooks:
            await until_due(claims.due_in_s)
    (second,) = claims.hooks
    assert second.attempt == 2
    assert not await state.end_hook("a", 1, HookStatus.DELIVERED)
    assert await state.end_hook("a", 2, HookStatus.WAITING, retry_in_s=0.0)
    (third,) = (await state.claim_hooks(5, ttl_s=TTL_S)).hooks
    assert await state.end_hook("a", third.attempt, HookStatus.DELIVERED)
    assert (await state.job("a")).hook is HookStatus.DELIVERED
    claims = await state.claim_hooks(5, ttl_s=TTL_S)
    assert claims.hooks == () and claims.due_in_s is None


async def test_webhooks_of_tenants_with_enough_are_passed_over(state: State) -> None:
    await submit(state, "a", webhook="https://example.com/hook")
    await submit(state, "x", tenant="beta", webhook="https://example.com/hook")
    for job in await claim(state, 2):
        await state.finish_job(job.lease, GOOD, b"1", keep_s=KEEP_S)
    claims = await state.claim_hooks(5, ttl_s=TTL_S, without=["acme"])
    assert [hook.id for hook in claims.hooks] == ["x"]
    assert [hook.id for hook in (await state.claim_hooks(1, ttl_s=TTL_S)).hooks] == ["a"]


async def test_predictions_are_listed_by_tenant_the_latest_first(state: State) -> None:
    await state.put_batch(batch(), batches=100)
    await submit(state, "a0", "a1", "a2")
    await submit(state, "x0", tenant="beta")
    await state.replace_batch(batch(), running(1), lines=[(spec("l0", batch="b0"), b"{}")])
    first, more = await state.predictions("acme", limit=2)
    assert ([job.spec.id for job in first], more) == (["a2", "a1"], True)
    rest, more = await state.predictions("acme", limit=2, after="a1")
    assert ([job.spec.id for job in rest], more) == (["a0"], False)
    assert await state.predictions("nobody", limit=2) == ([], False)
    for unknown in ("x0", "l0", "none"):
        with pytest.raises(NotFound):
            await state.predictions("acme", limit=2, after=unknown)
    one, two = await claim(state, 2)
    assert {one.spec.id, two.spec.id} == {"a0", "x0"}
    await state.finish_job(one.lease, BAD, b'{"error":{}}', keep_s=SHORT_S)
    await state.finish_job(two.lease, GOOD, b'{"n":1}', keep_s=SHORT_S)
    listed = (await state.predictions("acme", limit=9))[0] + (await state.predictions("beta", limit=9))[0]
    shown = {job.spec.id: (job.status, job.body, job.result) for job in listed}
    assert shown["a0"] == (JobStatus.FAILED, b"", b'{"error":{}}')
    assert shown["x0"] == (JobStatus.SUCCEEDED, b"", b"")
    async with asyncio.timeout(PATIENCE_S):  # what is removed is in no list
        while (await state.predictions("beta", limit=9))[0]:
            claims = await state.claim_jobs(0, ttl_s=TTL_S)
            if claims.due_in_s is not None:
                await until_due(claims.due_in_s)


async def test_jobs_and_batches_are_counted_by_status(state: State) -> None:
    assert await state.job_counts() == JobCounts()
    await submit(state, "a0", "a1")
    await state.put_batch(batch(), batches=100)
    await state.put_batch(batch("b1", webhook="https://example.com/hook"), batches=100)
    lines = [(spec("l0", batch="b0"), b"{}")]
    await state.replace_batch(batch(), running(1), lines=lines)
    counts = await state.job_counts()
    assert (counts.predictions, counts.lines) == ({JobStatus.QUEUED: 2}, {JobStatus.QUEUED: 1})
    assert counts.batches == {BatchStatus.VALIDATING: 1, BatchStatus.IN_PROGRESS: 1}
    assert counts.oldest_queued_s is not None and 0 <= counts.oldest_queued_s < PATIENCE_S
    first, second, line = await claim(state, 3)
    await state.finish_job(first.lease, GOOD, b"1", keep_s=KEEP_S, bill=bill("req-a0"))
    await state.requeue_job(second.lease, delay_s=60)
    await state.finish_job(line.lease, GOOD, b"1", keep_s=KEEP_S)
    counts = await state.job_counts()
    assert counts.predictions == {JobStatus.QUEUED: 1, JobStatus.BILLING: 1} and not counts.lines
    await state.settle_job(first.lease, keep_s=SHORT_S)
    await state.cancel_job("a1", STOPPED, b"", keep_s=SHORT_S)
    counts = await state.job_counts()
    assert counts.predictions == {JobStatus.SUCCEEDED: 1, JobStatus.CANCELLED: 1}
    assert counts.oldest_queued_s is None
    async with asyncio.timeout(PATIENCE_S):
        while (counts := await state.job_counts()).predictions:
            claims = await state.claim_jobs(1, ttl_s=TTL_S)
            if claims.due_in_s is not None:
                await until_due(claims.due_in_s)
    over = batch("b1", webhook="https://example.com/hook")
    ended = msgspec.structs.replace(over, status=BatchStatus.FAILED, times={BatchStatus.FAILED: NOW})
    await state.replace_batch(over, ended, keep_s=10)
    assert (await state.job_counts()).batches == {BatchStatus.IN_PROGRESS: 1, BatchStatus.FAILED: 1}


async def test_a_batch_reports_its_end_and_is_kept_until_it_has(state: State) -> None:
    made = batch(webhook="https://example.com/hook")
    await state.put_batch(made, batches=10)
    assert (await state.batch("b0"))[1].hook is HookStatus.WAITING
    assert (await state.claim_hooks(5, ttl_s=TTL_S)).hooks == ()
    ended = msgspec.structs.replace(made, status=BatchStatus.FAILED, times={BatchStatus.FAILED: NOW})
    await state.replace_batch(made, ended, keep_s=10)
    (first,) = (await state.claim_hooks(5, ttl_s=TTL_S)).hooks
    assert (first.id, first.tenant, first.url, first.attempt) == ("b0", "acme", made.webhook, 1)
    assert isinstance(first.subject, EndedBatch) and first.subject.record == ended
    assert (await state.claim_hooks(5, ttl_s=TTL_S)).hooks == ()
    assert await state.end_hook("b0", 1, HookStatus.WAITING, retry_in_s=0.0)
    (second,) = (await state.claim_hooks(5, ttl_s=TTL_S)).hooks
    assert not await state.end_hook("b0", 1, HookStatus.DELIVERED)
    assert await state.sweep_files(NOW + 20) == 0 and (await state.batch("b0"))[0] == ended
    assert await state.end_hook("b0", second.attempt, HookStatus.DELIVERED)
    assert (await state.batch("b0"))[1].hook is HookStatus.DELIVERED
    assert await state.sweep_files(NOW + 3600) == 1
    with pytest.raises(NotFound):
        await state.batch("b0")
    assert (await state.job_counts()).batches == {}


async def test_watchers_see_what_happens(state: State) -> None:
    watch = state.watch_jobs()
    seen: list[JobEvent] = []
    wanted = [JobEvent(JobEventKind.QUEUED, "a"), JobEvent(JobEventKind.ENDED, "a")]
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(watch) == ()
        await submit(state, "a")
        (ran,) = await claim(state)
        await state.finish_job(ran.lease, GOOD, b"1", keep_s=KEEP_S)
        while seen != wanted:
            seen += await anext(watch)
    await watch.aclose()  # type: ignore[attr-defined]


def part(name: str, size: int = 100) -> FilePart:
    return FilePart(digest=name * 64, size=size)


def file(name: str = "f0", tenant: str = "acme", *parts: FilePart, **changes: Any) -> FileRecord:
    record = FileRecord(
        id=name,
        tenant=tenant,
        name="calls.jsonl",
        purpose=FilePurpose.BATCH,
        created_at=NOW,
        expires_at=NOW + 100,
        parts=parts or (part("a"),),
    )
    return msgspec.structs.replace(record, **changes)


async def test_files_belong_to_a_tenant_and_end(state: State) -> None:
    more = {"files": 100, "file_bytes": 10_000}
    for one in (file("f0"), file("f1", created_at=NOW + 1), file("f2", "beta", part("b"), part("c"))):
        assert await state.put_file(one, **more) is Submission.QUEUED
    assert await state.put_file(file("f0"), **more) is Submission.EXISTS
    assert [one.id for one in await state.files("acme")] == ["f1", "f0"]
    assert (await state.file("f2")).size == 200
    assert await state.file_digests() == {"a" * 64, "b" * 64, "c" * 64}
    assert await state.put_file(file("f3"), files=6, file_bytes=500) is Submission.TENANT_FULL
    assert await state.put_file(file("f3"), files=3, file_bytes=5000) is Submission.FULL
    await state.delete_file("f0")
    await state.delete_file("f0")
    assert await state.put_file(file("f3"), files=3, file_bytes=10_000) is Submission.TENANT_FULL
    assert await state.sweep_files(NOW + 99) == 0
    assert await state.sweep_files(NOW + 100) == 2
    with pytest.raises(NotFound):
        await state.file("f1")
    assert await state.files("beta") == []
    assert await state.file_digests() == frozenset()
    assert await state.put_file(file("f4"), files=2, file_bytes=200) is Submission.QUEUED


async def test_an_empty_file_is_deleted_and_swept_as_others_are(state: State) -> None:
    for name in ("f0", "f1"):
        await state.put_file(msgspec.structs.replace(file(name), parts=()), files=100, file_bytes=100)
    await state.delete_file("f0")
    assert [one.id for one in await state.files("acme")] == ["f1"]
    assert await state.sweep_files(NOW + 100) == 1
    assert await state.files("acme") == []


def batch(name: str = "b0", tenant: str = "acme", **changes: Any) -> BatchRecord:
    record = BatchRecord(
        id=name,
        tenant=tenant,
        key_id="k0",
        endpoint="/v1/chat/completions",
        input_file="f0",
        completion_window="24h",
        created_at=NOW,
        expires_at=NOW + 86_400,
        metadata={"of": "tests"},
    )
    return msgspec.structs.replace(record, **changes)


def running(queued: int, **changes: Any) -> BatchRecord:
    return batch(status=BatchStatus.IN_PROGRESS, total=3, queued=queued, **changes)


async def test_lines_of_a_batch_become_jobs_and_results_once(state: State) -> None:
    assert await state.put_batch(batch(), batches=10) is Submission.QUEUED
    assert await state.put_batch(batch(), batches=10) is Submission.EXISTS
    assert await state.open_batches() == ["b0"]
    lines = [(spec(f"b0-{i}", batch="b0", line=i, custom_id=f"c{i}"), b"{}") for i in range(2)]
    assert await state.replace_batch(batch(), running(2), lines=lines) is Submission.QUEUED
    assert await state.replace_batch(batch(), running(2), lines=lines) is Submission.EXISTS
    one, two = await claim(state, 2)
    assert await state.batch_lines("b0") == ["b0-0", "b0-1"]
    assert await state.finish_job(one.lease, GOOD, b'{"ok":1}', keep_s=KEEP_S)
    assert await state.batch_lines("b0") == ["b0-1"]
    await state.finish_job(two.lease, BAD, b"", keep_s=KEEP_S, bill=bill("req-b0-1"))
    assert await state.settle_job(two.lease, keep_s=KEEP_S)
    assert not await state.finish_job(one.lease, GOOD, b'{"ok":1}', keep_s=KEEP_S)
    with pytest.raises(NotFound):  # its result is all that is left
        await state.job("b0-0")
    record, counts = await state.batch("b0")
    assert record == running(2)
    assert (counts.completed, counts.failed, counts.waiting) == (1, 1, 2) and counts.waiting_bytes > 100
    results = await state.batch_results("b0", 10)
    assert [result.spec.custom_id for result in results] == ["c0", "c1"]
    assert [result.outcome for result in results] == [GOOD, BAD]
    assert [bytes(result.result) for result in results] == [b'{"ok":1}', b""]
    flushed = running(2, flushed=1, output=(part("d"),))
    assert await state.replace_batch(record, flushed, taken=1) is Submission.QUEUED
    assert await state.replace_batch(record, flushed, taken=1) is Submission.EXISTS
    assert [result.spec.custom_id for result in await state.batch_results("b0", 10)] == ["c1"]
    assert (await state.batch("b0"))[1].waiting == 1
    assert "d" * 64 in await state.file_digests()
    ended = msgspec.structs.replace(
        flushed, status=BatchStatus.COMPLETED, output_file="f9", times={BatchStatus.COMPLETED: NOW}
    )
    output = file("f9", "acme", part("d"), purpose=FilePurpose.BATCH_OUTPUT)
    done = await state.replace_batch(flushed, ended, taken=1, files=[output], keep_s=10)
    assert done is Submission.QUEUED
    assert await state.open_batches() == [] and await state.batch_results("b0", 10) == []
    assert await state.file("f9") == output
    assert await state.batches("acme") == [
        (ended, BatchCounts(completed=1, failed=1)),
    ]
    assert await state.sweep_files(NOW + 10) == 1
    with pytest.raises(NotFound):
        await state.batch("b0")


async def test_lines_without_room_change_nothing(state: State) -> None:
    await state.put_batch(batch(), batches=10)
    lines = [(spec(f"b0-{i}", batch="b0"), b"{}") for i in range(3)]
    full = await state.replace_batch(batch(), running(3), lines=lines, bounds=JobBounds(jobs=4))
    assert full is Submission.TENANT_FULL
    assert await state.batch("b0") == (batch(), BatchCounts())
    assert await names(state, 5) == []


async def test_batches_are_bounded(state: State) -> None:
    made = [await state.put_batch(batch(f"b{i}"), batches=4) for i in range(3)]
    assert made == [Submission.QUEUED, Submission.QUEUED, Submission.TENANT_FULL]
    assert [record.id for record, _ in await state.batches("acme")] == ["b1", "b0"]
    with pytest.raises(NotFound):
        await state.batch("b9")


async def test_racing_gateways_claim_each_job_once(redis_url: str) -> None:
    async with RedisState.connect(redis_url) as one, RedisState.connect(redis_url) as other:
        await submit(one, *[f"race{i}" for i in range(60)], tenant="racers")
        rounds = await asyncio.gather(*(names(state, 4) for state in (one, other) * 10))
    assert Counter(name for each in rounds for name in each) == {f"race{i}": 1 for i in range(60)}


async def test_jobs_survive_a_kill_of_redis(tmp_path: Any) -> None:
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        await submit(state, "a", "b", webhook="https://example.com/")
        (ran,) = await claim(state)
        assert await state.finish_job(ran.lease, GOOD, b"1", keep_s=KEEP_S, bill=bill("req-a"))
        await server.kill()
        await server.start()
        assert (await state.job("a")).status is JobStatus.BILLING
        assert await state.settle_job(ran.lease, keep_s=KEEP_S)
        assert await names(state, 5) == ["b"]
        assert [hook.id for hook in (await state.claim_hooks(5, ttl_s=TTL_S)).hooks] == ["a"]
        assert replace(await state.job("a"), hook=None).status is JobStatus.SUCCEEDED
