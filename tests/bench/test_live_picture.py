"""The picture of a load that is served meanwhile, from what was recorded of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.live_picture.command import first_token
from benchmarks.live_picture.draw import StageSpan, draw, spans

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def live_record(at_s: float, **pipelines: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Return a live record, with pipelines by `id_epoch`."""
    listed = []
    for name, stages in pipelines.items():
        pipeline_id, epoch = name.split("_")
        places = [{"node": node, "first": first, "last": last} for node, first, last in stages]
        listed.append({"pipeline_id": pipeline_id, "epoch": int(epoch), "stages": places})
    return {"at_s": at_s, "kind": "live", "pipelines": listed}


def test_a_stage_lasts_as_long_as_its_pipeline_is_records_of() -> None:
    halves, other = [("a", 0, 4), ("b", 4, 8)], [("c", 0, 8)]
    events = [
        live_record(0.0),
        live_record(1.0, p_0=halves),
        live_record(2.0, p_0=halves),  # a member has switched
        live_record(3.0, p_1=halves, q_0=other),
        live_record(4.0, q_0=other),
    ]
    found = list(spans(events, 9.0))
    assert [(span.name, span.node, span.begin_s, span.end_s) for span in found] == [
        ("p.0", "a", 1.0, 3.0),
        ("p.0", "b", 1.0, 3.0),
        ("p.1", "a", 3.0, 4.0),
        ("p.1", "b", 3.0, 4.0),
        ("q.0", "c", 3.0, 9.0),
    ]
    assert found[1] == StageSpan(name="p.0", node="b", first=4, last=8, begin_s=1.0, end_s=3.0)


def test_what_was_recorded_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recorded = sorted(RESULTS.glob("live-picture-*.json"))
    assert recorded
    for kept in recorded:
        picture = tmp_path / f"{kept.stem}.png"
        draw(json.loads(kept.read_text())[0], picture)
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_first_live_token_is_a_share_of_the_first_whole_load() -> None:
    ready = [{"at_s": at_s, "kind": "instance", "state": "ready"} for at_s in (20.0, 24.0)]
    answers = [
        {"start_kind": "cold", "arrived_s": [4.0]},
        {"start_kind": "live", "arrived_s": [12.0, 13.0]},
        {"start_kind": "live", "arrived_s": [11.0]},
    ]
    found = first_token({"events": [live_record(1.0), *ready], "answers": answers}, sources=2)
    assert found == {"live": 2, "first_live_s": 11.0, "whole_s": [20.0, 24.0], "share": 0.55, "limit": 0.65}
    assert first_token({"events": ready, "answers": answers[:1]}, sources=1)["share"] is None
