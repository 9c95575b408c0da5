"""What watchers are shown of the cluster, and what of it is sent when it changes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.watch.board import BoardInput, WatchBoard
from gateway.watch.scope import WatchScope, scope_of
from gateway.watch.traffic import ShownTraffic
from registry.config.secrets import new_api_key
from registry.messages.arrivals import Arrivals, ArrivingImage, ArrivingLayers
from registry.records.api_key import KeyRole
from registry.records.cast import CastState
from registry.records.change import LiveChanged, NodeUp, Snapshot
from registry.records.function import Access, Function, Scaling
from registry.records.instance import InstanceState
from registry.records.live import LiveMode, LivePipeline, LiveRecord, LiveStage
from tests.fixtures.registry_records import NOW, cast, draft, instance, node

ALL = WatchScope(everything=True)
ACME = WatchScope(tenant="acme")
IMAGE = "a" * 64


def function(name: str = "tiny", owner: str = "", **changes: Any) -> Function:
    access = Access(owner=owner, private=bool(owner))
    given = {"versions": (1,), "current": 1, "scaling": Scaling(), "created_at": NOW, "access": access}
    return Function(name=name, **(given | changes))


def snapshot(**changes: Any) -> Snapshot:
    given: dict[str, Any] = {
        "functions": (function(),),
        "versions": (draft("tiny", version=1), draft("own", version=1)),
        "nodes": tuple(NodeUp(record=node(name, holdings=()), ttl_s=1.0) for name in ("n0", "n1", "n2")),
        "instances": (),
        "load_reports": (),
    }
    return Snapshot(cursor="", **(given | changes))


def given(
    view: Snapshot,
    arrivals: Mapping[str, Arrivals] | None = None,
    ended: Mapping[str, CastState] | None = None,
    traffic: tuple[ShownTraffic, ...] = (),
) -> BoardInput:
    return BoardInput(view=view, arrivals=arrivals or {}, ended=lambda _: ended or {}, traffic=traffic)


def whole(board: WatchBoard, scope: WatchScope = ALL) -> dict[str, Any]:
    frame = json.loads(board.whole(scope, NOW))
    assert frame["full"] and frame["gone"] == {}
    found: dict[str, Any] = frame["set"]
    return found


def sent(board: WatchBoard, next_: BoardInput, scope: WatchScope = ALL) -> dict[str, Any] | None:
    """Return what a watcher of a scope is sent after an update."""
    frame = board.frame(board.update(next_), scope, NOW)
    return None if frame is None else json.loads(frame)


def board_of(view: Snapshot, **more: Any) -> WatchBoard:
    board = WatchBoard()
    board.update(given(view, **more))
    return board


def test_a_whole_frame_has_all_and_a_heartbeat_alone_sends_nothing() -> None:
    board = board_of(snapshot(instances=(instance(),)))
    shown = whole(board)
    assert shown["nodes"].keys() == {"n0", "n1", "n2"} and shown["nodes"]["n0"]["gpu_free_bytes"] == 1 << 29
    assert shown["functions"]["tiny"]["version"] == 1 and shown["instances"]["i0"]["state"] == "loading"
    beat = tuple(
        NodeUp(record=node(name, counters={"busy_us": 5}, holdings=()), ttl_s=1.0)
        for name in ("n0", "n1", "n2")
    )
    assert sent(board, given(snapshot(nodes=beat, instances=(instance(),)))) is None


def test_only_what_changes_is_sent() -> None:
    board = board_of(snapshot(instances=(instance(), instance("i1", "n1"))))
    ready = instance(state=InstanceState.READY, progress=1.0)
    frame = sent(board, given(snapshot(instances=(ready,))))
    assert frame is not None and not frame["full"]
    assert frame["set"].keys() == {"instances"} and frame["set"]["instances"].keys() == {"i0"}
    assert frame["gone"] == {"instances": ["i1"]}


def test_a_tenant_sees_its_own_functions_and_no_nodes() -> None:
    mine, theirs = instance(function="own"), instance("i1", "n1")
    live = tuple(
        LiveChanged(
            record=LiveRecord(
                function=name, version=1, controller_epoch=1, serial=1, way=LiveMode.OFF, reason="", at=NOW
            ),
            ttl_s=1.0,
        )
        for name in ("own", "tiny")
    )
    traffic = tuple(
        ShownTraffic(
            function=name, version=1, in_flight=1, held=0, requests_s=1.0, tokens_s=2.0, ttft_ms=None
        )
        for name in ("own", "tiny")
    )
    view = snapshot(
        functions=(function(), function("own", "acme")),
        instances=(mine, theirs),
        live=live,
        casts=(cast(), cast("c1", function="own")),
    )
    board = board_of(view, traffic=traffic)
    shown = whole(board, ACME)
    assert {kind: list(entries) for kind, entries in shown.items()} == {
        "functions": ["own"],
        "instances": ["i0"],
        "live": ["own:1"],
        "casts": ["c1"],
        "traffic": ["own:1"],
    }
    assert whole(board, WatchScope(tenant="acme", only=frozenset({"another"}))) == {}
    assert sent(board, given(replace(view, instances=(mine,)), traffic=traffic), ACME) is None


def test_a_function_that_leaves_a_scope_leaves_with_all_that_belongs_to_it() -> None:
    view = snapshot(functions=(function("own", "acme"),), instances=(instance(function="own"),))
    board = board_of(view)
    assert whole(board, ACME).keys() == {"functions", "instances"}
    frame = sent(board, given(replace(view, functions=(function("own", "globex"),))), ACME)
    assert frame is not None and frame["full"] and frame["set"] == {}
    board = board_of(view)
    frame = sent(board, given(replace(view, functions=())), ACME)
    assert frame is not None and frame["full"] and frame["set"] == {}


def test_roles_see_what_their_rights_say() -> None:
    for role, everything in ((KeyRole.ADMIN, True), (KeyRole.VIEWER, True), (KeyRole.DEPLOYER, False)):
        key = new_api_key("acme", role, "").key
        assert scope_of(key) == (ALL if everything else ACME), role


def test_blocks_and_layers_fill_in_until_the_part_ends() -> None:
    view = snapshot(casts=(cast(),), instances=(instance(node_id="n1"),))
    board = board_of(view)
    assert board.follow == ["n1", "n2"]
    assert [part["state"] for part in whole(board)["casts"]["c0"]["parts"]] == [
        "source",
        "running",
        "running",
    ]
    arrivals = {
        "n1": Arrivals(
            at=NOW,
            images=(
                ArrivingImage(image=IMAGE, cells=4, held=b"\5"),
                ArrivingImage(image="f" * 64, cells=1, held=b""),
            ),
            instances=(
                ArrivingLayers(instance_id="i0", layers=8, held=b"\3"),
                ArrivingLayers(instance_id="unknown", layers=1, held=b""),
            ),
        )
    }
    frame = sent(board, given(view, arrivals))
    assert frame is not None
    assert frame["set"]["blocks"] == {
        "c0 n1": {"cast": "c0", "node": "n1", "cells": 4, "held": "BQ==", "at": NOW}
    }
    assert frame["set"]["layers"] == {"i0": {"layers": 8, "held": "Aw==", "at": NOW}}
    frame = sent(board, given(view, {}, {"n1": CastState.COMPLETE, "n2": CastState.FAILED}))
    assert frame is not None and frame["gone"] == {"blocks": ["c0 n1"], "layers": ["i0"]}
    shown = frame["set"]["casts"]["c0"]
    assert not shown["running"] and [part["state"] for part in shown["parts"]] == [
        "source",
        "complete",
        "failed",
    ]
    assert board.follow == ["n1"]  # its instance still loads


def test_a_part_that_ended_unseen_is_known_by_what_the_node_holds() -> None:
    nodes = (NodeUp(record=node("n0"), ttl_s=1.0), NodeUp(record=node("n1"), ttl_s=1.0))
    board = board_of(snapshot(nodes=nodes, casts=(cast(),)))
    assert [part["state"] for part in whole(board)["casts"]["c0"]["parts"]] == ["source", "complete", "lost"]
    assert board.follow == []


def test_only_the_latest_casts_are_shown() -> None:
    casts = tuple(cast(f"c{index}", started_at=NOW + index) for index in range(70))
    shown = whole(board_of(snapshot(casts=casts)))["casts"]
    assert len(shown) == 64 and "c69" in shown and "c5" not in shown


def test_pipelines_are_shown_stage_by_stage() -> None:
    stages = (
        LiveStage(node="n1", instance_id="i0", first=0, last=3),
        LiveStage(node="n2", instance_id="i1", first=3, last=5),
    )
    pipeline = LivePipeline(pipeline_id="p", epoch=2, stages=stages, head=1, rate=1.0, slots=4)
    record = LiveRecord(
        function="tiny",
        version=1,
        controller_epoch=1,
        serial=1,
        way=LiveMode.PIPELINE,
        reason="why",
        at=NOW,
        pipelines=(pipeline,),
    )
    board = board_of(snapshot())
    frame = sent(board, given(snapshot(live=(LiveChanged(record=record, ttl_s=1.0),))))
    assert frame is not None
    (shown,) = frame["set"]["live"]["tiny:1"]["pipelines"]
    assert (shown["name"], shown["head"]) == ("p.2", 1)
    assert [(one["node"], one["first"], one["last"]) for one in shown["stages"]] == [
        ("n1", 0, 3),
        ("n2", 3, 5),
    ]
