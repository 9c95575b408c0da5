"""Casts in which nodes are killed, hang and return; how trials are drawn, and their records."""

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop

from benchmarks.cast_faults import command as cast_faults
from benchmarks.cast_faults.fleet import Fleet, ResourceUse
from benchmarks.cast_faults.links import BlockDamage
from benchmarks.cast_faults.records import records, show
from benchmarks.cast_faults.run import Baseline, FaultRun, RunSetup, TrialResult
from benchmarks.cast_faults.trials import (
    CastRole,
    CastVariant,
    FaultKind,
    FaultMix,
    FaultTrial,
    InjectedFault,
    draw_trials,
    roles_of,
)
from benchmarks.harness.records import recording
from benchmarks.multicast.run import CastImage

SHAPES = (CastVariant("tcp", "chain"), CastVariant("shm", "binomial"))
DECK = FaultMix(casts=40, nodes=8, sources=2, blocks=16, shapes=SHAPES)
PARAMS: dict[str, object] = {"nodes": 8}


def outcome(trial: FaultTrial, seconds: float, wrong: Sequence[str] = ()) -> TrialResult:
    return TrialResult(
        trial=trial,
        seconds=seconds,
        struck_s=None if trial.strike is None else 0.9,
        processors=0.25,
        found=1,
        missed=0,
        faults={"damaged": 1},
        returned=None,
        wrong=tuple(wrong),
    )


def struck(shape: CastVariant, role: CastRole) -> FaultTrial:
    return FaultTrial(
        name="c", shape=shape, strike=InjectedFault(fault=FaultKind.KILL, role=role, rank=3, at=0.5)
    )


def test_the_same_seed_draws_the_same_casts_of_every_kind() -> None:
    trials = draw_trials(DECK, 7)
    assert trials == draw_trials(DECK, 7) != draw_trials(DECK, 8)
    assert [trial.shape for trial in trials[:2]] == list(SHAPES)
    assert all(trial.is_undisturbed for trial in trials[:2])
    assert len({trial.name for trial in trials}) == len(trials)
    strikes = [trial.strike for trial in trials if trial.strike is not None]
    assert len(strikes) == 40
    assert {strike.role for strike in strikes} == set(CastRole)
    assert any(strike.returns for strike in strikes)
    assert not any(strike.returns for strike in strikes if strike.role is CastRole.SOURCE)
    assert Counter(trial.is_undisturbed for trial in trials)[True] == len(SHAPES) * DECK.undisturbed
    assert {trial.damage for trial in trials if trial.strike is not None} == {0.0, DECK.damage}


def test_roles_are_those_of_the_plan() -> None:
    assert roles_of("chain", DECK) == {
        CastRole.SOURCE: [0, 1],
        CastRole.RELAY: [2, 3, 5, 6],
        CastRole.TARGET: [4, 7],
    }
    assert CastRole.TARGET not in roles_of("binomial", DECK)


def test_damage_that_no_check_finds_is_missed() -> None:
    damage = BlockDamage(1.0, "seed")
    block = memoryview(bytearray(100))
    check = damage.counting(lambda offset, view: [offset] if any(view) and offset < 200 else [])
    for offset in (100, 200):
        block[:] = bytes(100)
        damage.do(offset, block)
        check(offset, block)
    assert (damage.found, damage.missed) == (1, 1)


def test_what_a_process_has_more_than_before_is_leaked() -> None:
    before = ResourceUse(files={"socket": 1, "pipe": 2}, mapped=0, regions=(), tasks=2)
    assert before.excess_over(before) == ""
    after = ResourceUse(files={"socket": 3, "pipe": 1}, mapped=1, regions=("c",), tasks=3)
    assert after.excess_over(before) == "2 x socket, region c, 1 mapped images, 1 tasks"


def test_time_lost_is_counted_from_undisturbed_casts_of_the_same_shape() -> None:
    baseline = Baseline()
    outcomes = [
        outcome(FaultTrial(name="u", shape=shape), seconds) for shape in SHAPES for seconds in (1.0, 2.0)
    ]
    outcomes += [outcome(struck(SHAPES[0], CastRole.RELAY), seconds) for seconds in (1.5, 1.8, 3.0)]
    outcomes.append(outcome(struck(SHAPES[0], CastRole.RELAY), 0.8))  # it had ended before
    for one in outcomes:
        baseline.add(one)
    rows = records(outcomes, baseline, 0.3, PARAMS)
    last = rows[-1]
    assert (last["casts"], last["lost_share_median"], last["lost_share_max"]) == (3, 0.2, 1.0)
    assert last["holds"] and last["damaged_found"] == 8 and last["struck_too_late"] == 1
    printed = "\n".join(map(show, rows))
    assert "struck-relay" in printed and "\nholds" in printed
    assert not records(outcomes, baseline, 0.1, PARAMS)[-1]["holds"]
    leaky = [*outcomes, outcome(FaultTrial(name="l", shape=SHAPES[0]), 1.0, ["node 1: leaked 1 x socket"])]
    rows = records(leaky, baseline, 0.3, PARAMS)
    assert not rows[-1]["holds"] and "WRONG: tcp chain: node 1: leaked 1 x socket" in show(rows[-1])


def trials_of_every_fault() -> list[FaultTrial]:
    """Each transport undisturbed, then with a source, a relay and a target struck, one of which returns."""
    seeded, found = random.Random(3), list[FaultTrial]()
    for transport in cast_faults.TRANSPORTS:
        shape = CastVariant(transport, "chain")
        found.append(FaultTrial(name=f"{transport} undisturbed", shape=shape))
        for role, rank in ((CastRole.SOURCE, 0), (CastRole.RELAY, 2), (CastRole.TARGET, 3)):
            at, returns = seeded.uniform(0.2, 0.8), role is CastRole.RELAY
            strike = InjectedFault(fault=FaultKind.KILL, role=role, rank=rank, at=at, returns=returns)
            found.append(FaultTrial(name=f"{transport} {role}", shape=shape, strike=strike, damage=0.1))
    return found


@pytest.mark.timeout(600)
def test_casts_survive_kills_and_damage_and_leave_nothing(tmp_path: Path) -> None:
    image = CastImage.make(4 << 20, cast_faults.SEED)
    images = tmp_path / "images"
    images.mkdir()

    async def main() -> list[TrialResult]:
        with (tmp_path / "nodes.log").open("wb") as log:
            async with Fleet(5, 8e6, images, log) as fleet:
                run = FaultRun(fleet, RunSetup(image=image, blocks=16, sources=2, images=images))
                return [await run.cast(trial) for trial in trials_of_every_fault()]

    outcomes = uvloop.run(main())
    assert [one.wrong for one in outcomes] == [()] * 8, (tmp_path / "nodes.log").read_text()[-2000:]
    assert sum(one.found for one in outcomes) > 0
    assert [one.returned is not None for one in outcomes] == [False, False, True, False] * 2
    assert not list(images.iterdir())


def test_a_whole_run_writes_its_records(tmp_path: Path) -> None:
    options = "--casts 1 --nodes 3 --size 1MiB --blocks 4 --transport shm --planner chain --undisturbed 1"
    args = cast_faults.parse([*options.split(), "--json", str(tmp_path / "faults.json")])
    with recording("cast_faults", json=args.json) as out:
        cast_faults.carry_out(args, out)
    rows = out.records
    assert rows[0]["name"] == "undisturbed" and rows[-1]["name"] == "cast-faults"
    assert rows[-1]["wrong"] == [] and len(rows[-1]["each"]) == 1
    assert (tmp_path / "faults.json").exists()


def test_too_few_nodes_are_refused() -> None:
    for options in (["--nodes", "3", "--sources", "3"], ["--sources", "1"]):
        with pytest.raises(SystemExit):
            cast_faults.parse(options)
    assert isinstance(cast_faults.parse([]), argparse.Namespace)
