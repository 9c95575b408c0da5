"""What is made of the measurements of watchers."""

import pytest

from benchmarks.watchers import cast_record, parse, show


def test_a_watcher_costs_what_the_gateway_spends_more_and_sees_what_its_node_looked_at() -> None:
    unwatched = [{"gateway_share": share, "lags": []} for share in (0.07, 0.05, 0.06)]
    watched = [
        {"gateway_share": share, "lags": lags} for share, lags in ((0.065, [0.001]), (0.07, [0.1, 0.02]))
    ]
    row = cast_record({0: unwatched, 1: watched}, 8)
    assert row["watcher_share"] == pytest.approx(0.0075)
    assert (row["reports"], row["lag_max_s"]) == (3, 0.1)
    assert row["shown_within_s"] == pytest.approx(0.2)  # a node looks every 100 ms
    assert "0.75% of a core" in show(row) and "within 200 ms" in show(row)


def test_the_watchers_process_is_the_same_program() -> None:
    assert parse(["--watch", "http://127.0.0.1:1", "3"]).watch == ["http://127.0.0.1:1", "3"]
    assert parse([]).watchers == 100
