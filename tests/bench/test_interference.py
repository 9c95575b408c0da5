"""The pure parts of the interference benchmark: windows, records, scenarios."""

import pytest

from benchmarks.harness.stream_client import StreamResult
from benchmarks.interference import command
from benchmarks.interference.cluster import ServingNodes
from benchmarks.interference.conditions import ALONE, AVOIDED, SCENARIOS
from benchmarks.interference.figures import Window, first_tokens_within, gaps_within
from benchmarks.interference.records import records_of, show
from benchmarks.interference.run import ScenarioRun


def stream(due_s: float, *tokens_s: float, failure: str = "") -> StreamResult:
    """Return a stream with tokens at these times, and two events at its end."""
    return StreamResult(
        request_id=f"r{due_s}",
        due_s=due_s,
        first_s=tokens_s[0],
        last_s=tokens_s[-1],
        completion_tokens=len(tokens_s),
        events_s=[*tokens_s, tokens_s[-1] + 0.5, tokens_s[-1] + 0.5],
        failure=failure,
    )


def window(condition: str, started_s: float, ended_s: float, cast_s: float = 0.0) -> Window:
    sources = ("sender",) if cast_s else ()
    return Window(condition=condition, started_s=started_s, ended_s=ended_s, cast_s=cast_s, sources=sources)


def test_a_gap_counts_where_its_second_token_came() -> None:
    streams = [stream(0.0, 1.0, 1.5, 3.5, 4.0)]
    assert gaps_within(streams, [window("a", 1.2, 2.0)]) == [0.5]
    assert gaps_within(streams, [window("a", 1.2, 2.0), window("a", 3.0, 3.9)]) == [0.5, 2.0]
    assert gaps_within(streams, []) == []


def test_a_first_token_counts_where_its_stream_was_due() -> None:
    streams = [stream(0.0, 3.0, 3.1), stream(1.0, 1.5, 1.6)]
    assert first_tokens_within(streams, [window("a", 0.9, 1.1)]) == [0.5]


def run(**changes: object) -> ScenarioRun:
    found: dict[str, object] = {
        "streams": [stream(0.0, 1.0, 1.4, 1.8), stream(10.0, 11.0, 11.2, 11.4)],
        "windows": [
            window("one-queue", 0.0, 5.0, cast_s=4.0),
            window("limited", 5.0, 9.0, cast_s=3.0),
            window("elsewhere", 9.0, 9.5, cast_s=3.0),
            window(ALONE.name, 10.0, 15.0),
        ],
        "idle_casts_s": [2.0],
        "processor_share": 0.5,
        **changes,
    }
    return ScenarioRun(**found)  # type: ignore[arg-type]


def test_records_compare_with_the_streams_alone_and_the_casts_alone() -> None:
    rows = {row["name"]: row for row in records_of(SCENARIOS["streams-13b"], run(), 2, {"casts": 1})}
    assert list(rows) == [
        "streams-13b-one-queue",
        "streams-13b-limited",
        "streams-13b-elsewhere",
        "streams-13b-alone",
    ]
    slow = rows["streams-13b-one-queue"]
    assert slow["tbt_p99_s"] == pytest.approx(0.2) and slow["tbt_p99_ratio"] == pytest.approx(2.0)
    assert (slow["cast_s"], slow["idle_cast_s"], slow["cast_ratio"], slow["meets"]) == (2.0, 1.0, 2.0, False)
    assert slow["ttft_p50_s"] == 0.5 and slow["sources"] == ["sender"] and slow["counts"]
    alone = rows["streams-13b-alone"]
    assert "cast_s" not in alone and alone["tbt_p99_ratio"] == 1.0
    assert "2.00 x alone" in show(slow) and "cast" not in show(alone)
    assert show(rows["streams-13b-limited"])  # without a token in its window


def test_a_run_with_a_failed_stream_does_not_count() -> None:
    streams = [*run().streams, stream(1.0, 2.0, failure="timeout")]
    rows = records_of(SCENARIOS["streams-13b"], run(streams=streams), 1, {})
    assert all(row["failed"] == ["timeout"] and not row["counts"] for row in rows)


def test_every_scenario_ends_its_turn_without_a_cast() -> None:
    for scenario in SCENARIOS.values():
        assert scenario.conditions[-1] is ALONE
        assert (AVOIDED in scenario.conditions) is scenario.is_disaggregated


def test_sources_are_named_by_what_they_serve() -> None:
    nodes = ServingNodes(sender="n0", receiver="n1", other="n3")
    named = [nodes.role_of(node) for node in ("n0", "n1", "n2", "n3")]
    assert named == ["sender", "receiver", "n2", "other"]
    for scenario in SCENARIOS.values():
        assert all(nodes.named(role) for one in scenario.conditions for role in one.holders)


def test_what_cannot_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--width", "100"])
    assert "multiple of 64" in capsys.readouterr().err
    assert command.parse([]).scenarios == list(SCENARIOS)
