"""Metrics keep the rows of functions that exist."""

from dataclasses import replace

from gateway.control.daily_archive import ArchiveLag
from gateway.fakes.dispatcher import FakeCluster
from gateway.http.metrics import Metrics
from registry.clock import FakeClock
from registry.memory.state import MemoryState
from registry.records.function import Scaling
from tests.fixtures.registry_records import draft

AGE = 'hypercast_oldest_held_request_seconds{function="f"} '
LAG = "hypercast_ledger_archive_lag_seconds"


async def test_the_rows_of_deleted_functions_are_dropped() -> None:
    state = MemoryState()
    cluster = FakeCluster(state)
    metrics = Metrics(cluster.view)

    def count(name: str) -> None:
        metrics.requests[name, "1", "hot", "200"] += 1
        metrics.cold_starts[name,] += 1
        metrics.held.enter(name, "r")
        metrics.held.leave(name, "r")
        for latencies, labels in (
            (metrics.duration, (name,)),
            (metrics.first_token, (name, "hot")),
            (metrics.per_token, (name,)),
            (metrics.phases, (name, "load")),
            (metrics.casts, (name, "complete")),
        ):
            latencies.observe(labels, 0.1)

    for name in ("kept", "gone"):
        await state.create_version(replace(draft(), function=name), Scaling())
        count(name)
    count("new")  # a function that the view does not show yet
    metrics.requests["", "", "", "429"] += 1
    await cluster.refresh()
    assert metrics.render().count(b'"gone"') == metrics.render().count(b'"kept"') > 20
    await state.create_version(replace(draft(), function="new"), Scaling())
    await state.delete_function("gone")
    await cluster.refresh()
    count("gone")  # a request that ends after the deletion
    assert b'"gone"' in metrics.render()
    text = metrics.render()
    assert b'"gone"' not in text and b'"kept"' in text and b'code="429"' in text
    assert b"hypercast_event_loop_lag_seconds_count 0" in text
    assert "gone" not in {name for name, _, _ in metrics.held.rows()}


def test_the_oldest_held_request_has_an_age() -> None:
    clock = FakeClock()
    metrics = Metrics(FakeCluster(MemoryState()).view, clock=clock)

    def age() -> str:
        (row,) = (line for line in metrics.render().decode().splitlines() if line.startswith(AGE))
        return row.removeprefix(AGE)

    metrics.held.enter("f", "r1")
    clock.advance(5)
    metrics.held.enter("f", "r2")
    clock.advance(2)
    assert age() == "7.0"
    metrics.held.leave("f", "r1")
    assert age() == "2.0"


def test_the_archive_is_late_only_where_a_gateway_archives() -> None:
    clock = FakeClock()
    lag = ArchiveLag(clock)
    metrics = Metrics(FakeCluster(MemoryState()).view, archive_lag_s=lag.seconds)

    def shown() -> list[str]:
        return [line for line in metrics.render().decode().splitlines() if line.startswith(LAG)]

    assert shown() == []
    lag.set(None)
    assert shown() == [f"{LAG} 0.0"]
    lag.set(clock.wall_s() - 60)
    clock.advance(40)
    assert shown() == [f"{LAG} 100.0"]
    lag.forget()
    assert shown() == []
