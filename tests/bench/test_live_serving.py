"""What the benchmark of live serving finds wrong with answers and rows, and which loads it makes."""

import random
from dataclasses import replace
from itertools import islice

import msgspec
import pytest

from benchmarks.live_serving.check import last_members, pipelines_of, wrong_answers, wrong_rows
from benchmarks.live_serving.client import LiveAnswer, LiveRequest, draw_requests
from benchmarks.live_serving.command import SHORT, parse, scenarios
from benchmarks.live_serving.run import LoadRound, StageKill
from benchmarks.live_serving_switch.command import StreamSwitch, longest_gap, record_of
from registry.records.usage import GpuSlice, RequestRecord, RequestStatus
from tests.fixtures.registry_records import request

WORK = LiveRequest(prompt=(5, 6), tokens=3, seed=None)
EXPECTED = {("f", WORK): [7, 8, 9]}


def answer(*ids: int, failure: str = "") -> LiveAnswer:
    made = LiveAnswer(request_id="live-0", function="f", work=WORK, sent_s=0.0, start_kind="live")
    made.ids, made.arrived_s, made.failure = list(ids), [float(at) for at in range(len(ids))], failure
    made.prompt_tokens, made.completion_tokens = 2, len(ids)
    return made


def part(call: str, node: str, gpu_us: int) -> GpuSlice:
    return GpuSlice(call_id=call, instance_id=f"on-{node}", node=node, gpu_us=gpu_us)


def row(*gpu: GpuSlice) -> RequestRecord:
    return request(
        "live-0",
        function="f",
        start_kind="live",
        node="a",
        billed_gpu_ms=-(-sum(one.gpu_us for one in gpu) // 1000),
        prompt_tokens=2,
        completion_tokens=3,
        gpu=gpu,
    )


GOOD = row(part("live-0/0-x", "a", 700), part("live-0/0-x", "b", 800), part("live-0/1-x", "a", 30))


@pytest.mark.parametrize(
    ("ids", "failure", "says"),
    [
        ((7, 8, 9), "", ""),
        ((7, 8), "", "first difference at 2"),
        ((7, 8, 8, 9), "", "first difference at 2"),
        ((7, 8, 9, 9), "", "first difference at 3"),
        ((7, 8, 9), "the stream broke off", "broke off"),
    ],
)
def test_a_token_that_is_lost_repeated_or_changed_is_found(
    ids: tuple[int, ...], failure: str, says: str
) -> None:
    found = wrong_answers([answer(*ids, failure=failure)], EXPECTED)
    assert len(found) == bool(says)
    assert all(says in line for line in found)


def test_usage_that_counts_otherwise_is_found() -> None:
    response = answer(7, 8, 9)
    response.completion_tokens = 4
    assert len(wrong_answers([response], EXPECTED)) == 1


def test_a_row_tells_the_pipelines_that_worked_on_it() -> None:
    assert pipelines_of(GOOD) == [{"a", "b"}]
    assert wrong_rows([answer(7, 8, 9)], [GOOD]) == []


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "0 times"),
        ([GOOD, msgspec.structs.replace(GOOD, request_id="req-2", client_request_id="live-0")], "2 times"),
        ([msgspec.structs.replace(GOOD, completion_tokens=4)], "the ledger has"),
        ([msgspec.structs.replace(GOOD, status=RequestStatus.FAILED)], "failed"),
        ([msgspec.structs.replace(GOOD, billed_gpu_ms=9)], "billed 9 ms"),
        ([row(part("live-0/0-x", "a", 700))], "by a single node"),
        ([row(part("live-0/0-x", "a", 1), part("live-0/0-x", "b", 1), part("live-0/0-x", "a", 1))], "twice"),
        ([GOOD, msgspec.structs.replace(GOOD, request_id="live-7")], "no client sent it"),
    ],
)
def test_rows_that_are_not_as_clients_saw_their_requests_are_found(
    rows: list[RequestRecord], says: str
) -> None:
    found = wrong_rows([answer(7, 8, 9)], rows)
    assert len(found) == 1
    assert says in found[0]


def test_one_node_may_have_answered_where_one_held_the_model() -> None:
    response, rows = answer(7, 8, 9), [row(part("live-0/0-x", "a", 700))]
    assert wrong_rows([response], rows, alone=[response.request_id]) == []
    assert len(wrong_rows([response], rows, alone=["live-1"])) == 1


def test_a_member_that_nobody_paid_is_found_unless_it_was_killed_or_the_call_went_on_elsewhere() -> None:
    unpaid = row(part("live-0/0-x", "a", 700), part("live-0/0-x", "b", 0))
    (found,) = wrong_rows([answer(7, 8, 9)], [unpaid])
    assert "no time recorded for b" in found
    assert wrong_rows([answer(7, 8, 9)], [unpaid], unsure=["on-b"]) == []
    cut_short = row(part("live-0/0-x", "a", 700), part("live-0/0-x", "b", 0), part("live-0/1-x", "a", 5))
    assert wrong_rows([answer(7, 8, 9)], [cut_short]) == []
    then_unpaid = row(part("live-0/10-x", "a", 700), part("live-0/10-x", "b", 0), part("live-0/9-x", "a", 5))
    (found,) = wrong_rows([answer(7, 8, 9)], [then_unpaid], unsure=["on-c"])
    assert "no time recorded for b" in found


def test_who_made_the_last_token_is_told_unless_one_of_them_was_killed() -> None:
    assert last_members(GOOD) == [part("live-0/1-x", "a", 30)]
    both = row(part("live-0/0-x", "a", 700), part("live-0/0-x", "b", 800))
    assert last_members(both) == list(both.gpu)
    assert last_members(both, ["on-b"]) == []
    assert last_members(row()) == []


def test_every_family_and_number_of_holders_is_played_with_and_without_a_switch() -> None:
    args = parse([])
    made = list(scenarios(args, [], started_s=0.0))
    assert len({(one.family, one.sources, one.long) for one in made}) == len(made) == 3 * 3 * 2
    assert {one.kills for one in made} == {0}


def test_loads_go_on_until_there_were_enough_kills() -> None:
    args = parse(["--kills", "7", "--per-load", "3"])
    done: list[LoadRound] = []
    kill = StageKill(node="a", place=0, stages=2, is_head=True, load_s=1.0, calls=64, tokens=9)
    for scenario in islice(scenarios(args, done, started_s=float("inf")), 9):
        done += [LoadRound(scenario=scenario, kills=[kill] * scenario.kills)]
    assert [one.scenario.kills for one in done] == [3, 3, 1]
    assert all(one.scenario.long for one in done)


def test_no_load_begins_when_the_time_is_over() -> None:
    args = parse(["--kills", "7"])
    assert list(scenarios(args, [], started_s=-1e9)) == []


def test_works_are_the_same_for_a_seed_and_half_of_them_drawn() -> None:
    works = draw_requests(random.Random(3), 8, SHORT)
    assert works == draw_requests(random.Random(3), 8, SHORT)
    assert sum(work.seed is None for work in works) == 4
    assert all(SHORT[0] <= work.tokens <= SHORT[1] for work in works)


def test_a_switch_is_judged_by_its_longest_gap() -> None:
    made = answer(1, 2, 3, 4)
    made.arrived_s = [0.0, 0.1, 0.5, 0.6]
    assert longest_gap(made) == (2, pytest.approx(0.4))
    switch = StreamSwitch(
        context=1000, gap_ms=150.0, usual_gap_ms=5.0, recompute_ms=100.0, after_last_block_ms=(20.0, 30.0)
    )
    good = record_of([switch, replace(switch, gap_ms=190.0)], {})
    assert good["holds"] and good["worst_ratio"] == 1.9
    assert not record_of([replace(switch, gap_ms=201.0)], {})["holds"]
    assert not record_of([replace(switch, after_last_block_ms=(60.0, 70.0))], {})["holds"]
