"""Metrics keep the rows of functions that exist."""

from dataclasses import replace

from gateway.fakes.dispatcher import FakeCluster
from gateway.http.metrics import Metrics
from registry.memory.state import MemoryState
from registry.records.function import Scaling
from tests.fixtures.registry_records import draft


async def test_the_rows_of_deleted_functions_are_dropped() -> None:
    state = MemoryState()
    cluster = FakeCluster(state)
    metrics = Metrics(cluster.view)

    def count(name: str) -> None:
        metrics.requests[name, "1", "hot", "200"] += 1
        metrics.cold_starts[name,] += 1
        metrics.held[name] += 0
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
    assert "gone" not in metrics.held
