"""The cluster as frames of the watch show it: rows, sums, and what fits a screen."""

import base64
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cli.board import ClusterBoard, counted
from cli.cluster_view import MIN_ROWS, bar, headline, shares, tables


def frame(
    *, full: bool = False, at: float = 100.0, gone: dict[str, list[str]] | None = None, **set_: Any
) -> Any:
    return {"full": full, "at": at, "set": set_, "gone": gone or {}}


def node(**changes: Any) -> dict[str, Any]:
    memory = {
        "gpu_bytes": 4 << 30,
        "gpu_free_bytes": 3 << 30,
        "host_bytes": 8 << 30,
        "host_free_bytes": 8 << 30,
    }
    return {"host": "h0", "state": "ready", "gpu_type": "h100", **memory, **changes}


def instance(function: str = "coder", **changes: Any) -> dict[str, Any]:
    plain = {"version": 1, "node": "n0", "state": "ready", "progress": 1.0, "leads": True}
    return {"function": function, **plain, **changes}


def traffic(function: str = "coder", **changes: Any) -> dict[str, Any]:
    quiet = {"version": 1, "in_flight": 0, "held": 0, "requests_s": 0.0, "tokens_s": 0.0, "ttft_ms": None}
    return {"function": function, **quiet, **changes}


def cast(*states: str, **changes: Any) -> dict[str, Any]:
    parts = [{"node": f"n{number}", "tier": "", "state": state} for number, state in enumerate(states)]
    running = "running" in states
    plain = {"version": 1, "nbytes": 1 << 30, "planner": "binomial", "started_at": 90.0}
    return {"function": "coder", **plain, "running": running, "parts": parts, **changes}


def test_frames_are_folded_and_name_what_they_change() -> None:
    board = ClusterBoard()
    assert board.apply(frame(full=True, nodes={"n0": node(), "n1": node()})) == {"nodes", "full"}
    assert board.apply(frame(at=101.0, gone={"nodes": ["n0"]}, functions={"coder": {}})) == {
        "nodes",
        "functions",
    }
    assert (list(board.entries("nodes")), board.at) == (["n1"], 101.0)
    before = board.copy()
    board.apply(frame(full=True, nodes={"n2": node()}))
    assert [row["id"] for row in board.nodes()] == ["n2"] and not board.entries("functions")
    assert [row["id"] for row in before.nodes()] == ["n1"]


def test_functions_are_shown_by_what_they_do() -> None:
    board = ClusterBoard()
    board.apply(
        frame(
            full=True,
            functions={name: {"version": 1} for name in ("asleep", "busy", "group", "starting")},
            instances={
                "i0": instance("busy"),
                "i1": instance("busy", state="loading"),
                "i2": instance("starting", state="starting"),
                "i3": instance("group"),
                "i4": instance("group", leads=False),
            },
            traffic={
                "busy:1": traffic("busy", in_flight=2, requests_s=1.0, ttft_ms=900.0),
                "busy:2": traffic("busy", in_flight=3, requests_s=4.5, tokens_s=80.0, ttft_ms=250.0),
            },
        )
    )
    rows = board.functions()
    assert [(row["name"], row["state"], row["ready"], row["starting"]) for row in rows] == [
        ("busy", "ready", 1, 1),
        ("group", "ready", 1, 0),
        ("starting", "loading", 0, 1),
        ("asleep", "asleep", 0, 0),
    ]
    assert [rows[0][field] for field in ("in_flight", "requests_s", "tokens_s", "ttft_ms")] == [
        5,
        5.5,
        80,
        250,
    ]
    totals = board.totals()
    assert totals["functions"] == {"ready": 2, "loading": 1, "asleep": 1}
    assert totals["instances"] == {"ready": 2, "loading": 1, "starting": 1}
    assert totals["in_flight"] == 5
    text = tables(board, None)
    assert "250 ms" in text and "80.0" in text
    assert "5 calls in flight, 0 held; 5.5 requests/s, 80.0 tokens/s" in headline(board)


def test_casts_show_how_much_has_arrived() -> None:
    board = ClusterBoard()
    half = {"cells": 8, "held": base64.b64encode(bytes([0b00001111])).decode()}
    board.apply(
        frame(
            full=True,
            casts={
                "old": cast("source", "complete", started_at=50.0),
                "bad": cast("source", "complete", "failed", started_at=60.0),
                "now": cast("source", "complete", "running", "running", started_at=40.0),
            },
            blocks={"now n2": half},
        )
    )
    rows = board.casts()
    assert [(row["cast_id"], row["state"], row["done"], row["targets"]) for row in rows] == [
        ("now", "running", 1, 3),
        ("bad", "failed", 1, 2),
        ("old", "complete", 1, 1),
    ]
    assert [row["progress"] for row in rows] == [0.5, 0.5, 1.0]
    assert rows[0]["age_s"] == 60.0
    assert bar(0.5).endswith(" 50%") and "50%" in tables(board, None)


@given(st.lists(st.integers(0, 600), max_size=3), st.integers(0, 200))
def test_tables_fit_the_screen_and_leave_no_room(wanted: list[int], height: int) -> None:
    found = shares(wanted, height)
    for rows, has in zip(wanted, found, strict=True):
        assert min(rows, MIN_ROWS) <= has <= rows
    room = height - 3 * len(wanted)
    if sum(wanted) <= room:
        assert found == wanted
    elif room >= MIN_ROWS * len(wanted):
        assert room - len(wanted) < sum(found) <= room
    assert shares(wanted, None) == wanted


def test_long_tables_say_what_they_leave_out() -> None:
    board = ClusterBoard()
    board.apply(
        frame(
            full=True,
            nodes={f"n{number:03}": node() for number in range(500)},
            functions={f"f{number:03}": {"version": 1} for number in range(200)},
        )
    )
    lines = tables(board, 40).splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if line.startswith("…")] == ["… and 483 more", "… and 183 more"]


def test_counts_are_in_a_given_order() -> None:
    assert counted({"lost": 1, "ready": 2, "asleep": 0}, ("ready", "asleep")) == "2 ready, 1 lost"
    assert counted({}) == ""
