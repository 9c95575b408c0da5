"""The audit log of every State: an entry once, one outcome, the latest first, and no more than its length."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from registry import keys
from registry.errors import InvalidRecord, StateFull
from registry.records.audit import AuditEntry, AuditLogName, AuditOutcome, AuditQuery
from registry.redis.state import RedisState
from registry.state import State
from tests.fixtures.plain_redis import PlainRedis


def entry(number: int, **changes: object) -> AuditEntry:
    made = AuditEntry(id=f"req-{number}", at=time.time(), gateway="g", operation="scale", target="tiny")
    return replace(made, **changes)  # type: ignore[arg-type]


def outcome(status: int) -> AuditOutcome:
    return AuditOutcome(at=time.time(), status=status)


async def test_an_entry_is_written_once_and_has_one_outcome(state: State):
    one = entry(1, fields={"instances": 1}, key_id="ab", tenant="t", role="admin", address="::1")
    await state.add_audit_entry(one)
    assert [record.outcome for record in (await state.audit_page()).records] == [None]
    for repeated in (outcome(200), outcome(500)):
        await state.add_audit_entry(one)
        await state.end_audit_entry(one.id, repeated)
    await state.end_audit_entry("req-unknown", outcome(200))
    (found,) = (await state.audit_page()).records
    assert found.entry == one
    assert found.outcome is not None and found.outcome.status == 200


async def test_pages_go_from_the_latest_to_the_first(state: State):
    for number in range(5):
        await state.add_audit_entry(entry(number))
    await state.end_audit_entry("req-0", outcome(404))
    seen, cursor = [], ""
    while True:
        page = await state.audit_page(AuditQuery(limit=2, cursor=cursor))
        seen += page.records
        cursor = page.cursor
        if not cursor:
            break
    assert [one.entry.id for one in seen] == [f"req-{number}" for number in (4, 3, 2, 1, 0)]
    assert [one.outcome and one.outcome.status for one in seen] == [None] * 4 + [404]
    for wrong in ("x", "1-2-3", "²-1", "1-" + "9" * 40):
        with pytest.raises(InvalidRecord, match="cursor"):
            await state.audit_page(AuditQuery(cursor=wrong))


async def test_pages_have_a_period(state: State):
    await state.add_audit_entry(entry(1))
    between = (int(time.time() * 1000) + 1) / 1000  # the log's clock has milliseconds
    while time.time() < between:
        pass
    await state.add_audit_entry(entry(2))

    async def ids(since: float | None, until: float | None) -> list[str]:
        page = await state.audit_page(AuditQuery(since=since, until=until))
        return [one.entry.id for one in page.records]

    assert await ids(between, None) == ["req-2"]
    assert await ids(None, between) == ["req-1"]
    assert await ids(between - 60, between + 60) == ["req-2", "req-1"]
    assert await ids(between + 60, None) == await ids(None, between - 60) == []


async def test_refusals_have_a_log_of_their_own(state: State):
    await state.add_audit_entry(entry(1))
    await state.add_audit_entry(entry(2), log=AuditLogName.REFUSED)
    await state.end_audit_entry("req-2", outcome(403), log=AuditLogName.REFUSED)
    assert [one.entry.id for one in (await state.audit_page()).records] == ["req-1"]
    (refused,) = (await state.audit_page(AuditQuery(log=AuditLogName.REFUSED))).records
    assert refused.outcome is not None and refused.outcome.status == 403


async def test_the_oldest_are_removed_with_their_outcomes(state: State):
    for number in range(7):
        await state.add_audit_entry(entry(number), length=3)  # type: ignore[call-arg]
        await state.end_audit_entry(f"req-{number}", outcome(200))
    assert [one.entry.id for one in (await state.audit_page()).records] == ["req-6", "req-5", "req-4"]
    await state.end_audit_entry("req-0", outcome(200))  # a change that took longer than the log reaches back
    if isinstance(state, RedisState):
        assert await state._redis.call("HLEN", keys.audit_outcomes("changes")) == 3


async def test_a_full_redis_takes_entries(tmp_path: Path) -> None:
    with PlainRedis(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as redis:
        async with RedisState.connect(redis.url) as state:
            with pytest.raises(StateFull):
                for number in range(100):
                    await state._redis.call("SET", f"fill {number}", "x" * 100_000)
            await state.add_audit_entry(entry(1))
            await state.end_audit_entry("req-1", outcome(200))
            (found,) = (await state.audit_page()).records
            assert found.outcome is not None and found.outcome.status == 200
