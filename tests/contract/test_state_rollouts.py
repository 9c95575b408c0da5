"""Rollouts in the shared state, asked of the one in Redis and of the one in memory."""

import asyncio
from dataclasses import replace

import pytest

from registry.errors import Conflict, NotFound
from registry.records.change import FunctionChanged
from registry.records.function import Function
from registry.records.rollout import RolloutPlan, RolloutState
from registry.records.rollout_changes import begin_rollout, end_rollout, run_rollout
from registry.state import State
from tests.fixtures.registry_records import draft
from tests.fixtures.state import after

PLAN = RolloutPlan(candidate=2, percent=12.5, steps=(12.5, 100))


def begin(head: Function) -> Function:
    return begin_rollout(head, PLAN, id_="r", at=5.0)


async def test_a_version_can_be_added_without_being_made_current(state: State) -> None:
    first = await state.create_version(draft(), None, becomes_current=False)
    assert (await state.function("tiny")).current == first.version == 1
    cursor = (await state.snapshot()).cursor
    second = await state.create_version(draft(image="d" * 64), None, becomes_current=False)
    head = await state.function("tiny")
    assert (head.current, head.versions, second.version) == (1, (1, 2), 2)
    assert await after(state, cursor, 1) == [FunctionChanged(function=head, version=second)]
    assert await state.version("tiny") == first


async def test_a_rollout_is_kept_in_the_head_and_the_feed(state: State) -> None:
    await state.create_version(draft(), None)
    second = await state.create_version(draft(image="d" * 64), None, becomes_current=False)
    cursor = (await state.snapshot()).cursor
    began = await state.change_rollout("tiny", begin)
    assert began == await state.function("tiny") and began.candidate == 2
    ran = await state.change_rollout("tiny", lambda head: run_rollout(head, "r", at=6.0))
    with pytest.raises(Conflict, match="is being rolled out"):
        await state.create_version(draft(image="e" * 64), None)
    third = await state.create_version(draft(image="e" * 64), None, becomes_current=False)
    assert third.version == 3
    done = await state.change_rollout(
        "tiny", lambda head: end_rollout(head, "r", RolloutState.PROMOTED, "", at=7.0)
    )
    assert done.current == 2 and await state.version("tiny") == second
    changes = await after(state, cursor, 4)
    heads = [change.function for change in changes]  # type: ignore[union-attr]
    assert heads == [began, ran, replace(ran, versions=(1, 2, 3)), done]
    assert [change.version.version for change in changes] == [1, 1, 3, 2]  # type: ignore[union-attr]
    assert (await state.snapshot()).functions == (done,)


async def test_another_current_version_ends_the_rollout(state: State) -> None:
    for image in "ab":
        await state.create_version(draft(image=image * 64), None)
    await state.create_version(draft(image="c" * 64), None, becomes_current=False)
    plan = replace(PLAN, candidate=3)
    await state.change_rollout("tiny", lambda head: begin_rollout(head, plan, id_="r", at=5.0))
    head = await state.set_current("tiny", 1, at=9.0)
    assert head.current == 1 and head.rollout is not None
    assert (head.rollout.state, head.rollout.since) == (RolloutState.ABORTED, 9.0)
    assert head.active_rollout is None


async def test_of_two_that_begin_one_wins_and_none_of_a_missing_function(state: State) -> None:
    await state.create_version(draft(), None)
    for image in "de":
        await state.create_version(draft(image=image * 64), None, becomes_current=False)

    async def begin_with(candidate: int) -> bool:
        plan = replace(PLAN, candidate=candidate)
        try:
            await state.change_rollout(
                "tiny", lambda head: begin_rollout(head, plan, id_=f"r{candidate}", at=5.0)
            )
        except Conflict:
            return False
        return True

    assert sorted(await asyncio.gather(begin_with(2), begin_with(3))) == [False, True]
    with pytest.raises(NotFound):
        await state.change_rollout("absent", begin)
