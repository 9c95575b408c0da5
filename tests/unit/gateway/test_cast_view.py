"""What is shown of a cast: the plan beside what its nodes reported."""

from dataclasses import replace

import msgspec
import pytest

from gateway.api.cast_view import show, silent_s
from gateway.schemas.casts import CastList, CastView
from rdmacast.cast.record import CastMember
from registry.errors import StateUnavailable
from registry.memory.state import MemoryState
from registry.records.cast import CastProgress, CastRecord, CastState, CastStatus
from registry.records.change import NodeUp
from registry.records.node import Tier
from tests.fixtures.gateway_http import gateway
from tests.fixtures.registry_records import NOW, cast, cast_progress, node

NODES = {name: node(name) for name in ("n0", "n1", "n2", "n9")}


def complete(name: str, **changes: object) -> CastProgress:
    return cast_progress(
        name, state=CastState.COMPLETE, held=4, received={"tcp": 1 << 20}, updated_at=NOW + 2, **changes
    )


def seen(*progress: CastProgress, record: CastRecord | None = None, now: float = NOW + 3) -> CastView:
    return show(CastStatus(record=record or cast(), progress=progress), NODES, now)


def test_a_running_cast_adds_up_what_its_targets_told() -> None:
    shown = seen(cast_progress(faults={"late": 1, "lost": 1}), cast_progress("n2", faults={"late": 2}))
    assert (shown.state, shown.done, shown.targets, shown.blocks) == ("running", 0, 2, 4)
    assert shown.received == {"tcp": 1 << 20} and shown.faults == {"late": 3, "lost": 1}
    assert shown.bytes_s == (1 << 20) / 0.5 and shown.seconds == shown.age_s == 3
    assert [part.state for part in shown.nodes] == ["source", "running", "running"]
    assert shown.nodes[1].held == 2 and shown.nodes[1].bytes_s == (1 << 19) / 0.5


def test_a_cast_is_over_with_its_last_target() -> None:
    shown = seen(complete("n1"), complete("n2", seconds=1.0), now=NOW + 100)
    assert (shown.state, shown.done, shown.seconds, shown.age_s) == ("complete", 2, 2, 100)
    assert shown.bytes_s == 2 << 20
    assert seen(complete("n1")).state == "running"


@pytest.mark.parametrize(
    ("state", "outcome"), [(CastState.FAILED, "failed"), (CastState.CANCELLED, "cancelled")]
)
def test_the_worst_that_a_target_came_to_is_the_outcome(state: CastState, outcome: str) -> None:
    shown = seen(complete("n1"), cast_progress("n2", state=state, error="why"))
    assert (shown.state, shown.done, shown.nodes[2].error) == (outcome, 1, "why")


def test_a_target_that_could_not_begin_told_nothing_at_any_time() -> None:
    in_its_stead = cast_progress("n2", state=CastState.FAILED, seconds=0.0, updated_at=0.0)
    shown = seen(complete("n1"), in_its_stead)
    assert (shown.state, shown.seconds, shown.nodes[2].updated_at) == ("failed", 2, None)


def test_a_target_whose_process_is_gone_is_lost() -> None:
    reported = CastStatus(record=cast(), progress=(complete("n1"), cast_progress("n2")))
    gone = show(reported, {name: NODES[name] for name in ("n0", "n1")}, NOW + 3)
    assert (gone.state, gone.nodes[2].state, gone.nodes[2].error) == ("failed", "lost", "its node has left")
    anew = show(reported, NODES | {"n2": replace(NODES["n2"], started_at=NOW + 1)}, NOW + 3)
    assert anew.nodes[2].error == "its node restarted"
    only = show(CastStatus(record=cast(), progress=(complete("n1"), complete("n2"))), {}, NOW + 3)
    assert only.state == "complete"  # what it reported before counts


@pytest.mark.parametrize("block_bytes", [1, 52 << 20])
def test_one_to_which_a_large_block_is_coming_is_not_lost(block_bytes: int) -> None:
    record = cast(nbytes=512 * block_bytes, block_bytes=block_bytes)
    gives_up_after_s = 30.0 + 3 * block_bytes / (256 << 10)
    for reported in ([], [cast_progress("n1", updated_at=NOW), cast_progress("n2", updated_at=NOW)]):
        assert seen(*reported, record=record, now=NOW + gives_up_after_s + 20).state == "running"
        assert seen(*reported, record=record, now=NOW + gives_up_after_s + 60).state == "failed"


def test_a_target_of_which_nothing_is_heard_is_lost_in_the_end() -> None:
    silence_s = silent_s(cast().block_bytes)
    soon, late = NOW + silence_s - 1, NOW + silence_s + 1
    assert [part.state for part in seen(now=soon).nodes] == ["source", "waiting", "waiting"]
    assert seen(now=late).nodes[1].error == "it never started" and seen(now=late).state == "failed"
    assert seen(cast_progress(), now=late).nodes[1].error.startswith("silent for")


def test_those_that_joined_later_are_told_apart() -> None:
    late = CastMember(node="n9", host="h9", address="tcp://127.0.0.1:9")
    members = cast().members
    record = cast(members=(replace(members[0], tier=Tier.HOST), *members[1:], late), epoch=1)
    shown = seen(record=record)
    assert [(part.node, part.tier, part.planned) for part in shown.nodes] == [
        ("n0", "host", True),
        ("n1", "none", True),
        ("n2", "none", True),
        ("n9", "none", False),
    ]


def test_of_one_that_came_back_its_new_part_is_shown_from_the_begin() -> None:
    source, first, second = cast().members
    back = replace(first, epoch=1, joined_at=NOW + 100)
    record = cast(members=(source, back, second), epoch=1)
    before, others = complete("n1"), complete("n2")
    shown = seen(before, others, record=record, now=NOW + 101)
    assert (shown.state, shown.done, shown.nodes[1].state) == ("running", 1, "waiting")
    assert (shown.nodes[1].held, shown.nodes[1].received, shown.received) == (0, {}, {"tcp": 1 << 20})
    # Its process began after the cast, which is why it came back.
    anew = show(
        CastStatus(record=record, progress=(before, others)),
        NODES | {"n1": replace(NODES["n1"], started_at=NOW + 90)},
        NOW + 101,
    )
    assert anew.nodes[1].state == "waiting"
    started = cast_progress("n1", epoch=1, updated_at=NOW + 102)
    assert seen(started, others, record=record, now=NOW + 103).nodes[1].state == "running"
    late = NOW + 100 + silent_s(record.block_bytes) + 1
    assert seen(before, others, record=record, now=late - 2).nodes[1].state == "waiting"
    assert seen(before, others, record=record, now=late).nodes[1].error == "it never started"


class Away(MemoryState):
    async def casts(
        self, beginning: str = "", *, function: str | None = None, brief: bool = False
    ) -> list[CastStatus]:
        raise StateUnavailable("no Redis")


async def test_admins_read_casts_by_function() -> None:
    async with gateway() as gw, gw.http() as http:
        gw.cluster.snapshot = replace(
            gw.cluster.snapshot, nodes=(NodeUp(record=node("n1", started_at=1.0), ttl_s=6.0),)
        )
        await gw.state.put_cast(cast())
        await gw.state.put_cast(cast("c1", function="other", started_at=NOW + 1))
        await gw.state.put_cast_progress(complete("n1"))
        answer = await http.get("/admin/casts")
        found = msgspec.json.decode(answer.content, type=CastList).casts
        assert [one.cast_id for one in found] == ["c1", "c0"]
        assert found[1].nodes[1].transports == {"n0": "tcp: another host"}
        of_tiny = (await http.get("/admin/casts?function=tiny")).json()["casts"]
        assert [one["function"] for one in of_tiny] == ["tiny"]
        short = (await http.get("/admin/casts?cast=c0&summary=true")).json()["casts"]
        assert [(one["cast_id"], one["done"], one["nodes"]) for one in short] == [("c0", 1, [])]
        assert (await http.get("/admin/casts?function=nobody")).json() == {"casts": []}
        assert (await http.get(f"/admin/casts?function={'x' * 999}")).status_code == 422
        async with gw.http(gw.caller_key) as caller:
            assert (await caller.get("/admin/casts")).status_code == 403


async def test_without_redis_they_are_unavailable() -> None:
    async with gateway(state=Away()) as gw, gw.http() as http:
        answer = await http.get("/admin/casts")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_unavailable")
        assert "retry-after" in answer.headers
