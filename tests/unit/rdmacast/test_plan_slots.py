"""Casts whose blocks leave and come in the order of the plan's steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacast.errors import ProtocolError
from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.planners.own_part import own_part
from rdmacast.plan.planners.slots import MAX_SLOTTED_TRANSFERS, slots_of
from rdmacast.plan_slot import PlanSlot
from tests.fixtures.cast import BLOCKS, KINDS, make_rig


@given(st.integers(2, 20), st.integers(1, 12), st.integers(1, 3))
def test_steps_are_those_of_the_plan_and_nothing_leaves_between_after_and_them(
    nodes: int, blocks: int, sources: int
) -> None:
    shape = CastShape(nodes=nodes, sources=tuple(range(min(sources, nodes - 1))), blocks=blocks)
    transfers = PLANNERS["binomial"].plan(shape).transfers
    gives = {(int(source), int(step)) for source, step in zip(transfers.source, transfers.step, strict=True)}
    for node in shape.targets:
        steps = slots_of("binomial", shape, node)
        order = own_part("binomial", shape, node)
        assert [block for _, block in order] == sorted(steps, key=lambda block: steps[block][0])
        for source, block in order:
            step, after = steps[block]
            assert (source, step) in gives
            assert after == 0 or (source, after - 1) in gives
            assert not any((source, between) in gives for between in range(after, step))


def test_a_plan_that_is_too_large_has_no_steps() -> None:
    shape = CastShape(nodes=MAX_SLOTTED_TRANSFERS + 2, sources=(0,), blocks=1)
    assert slots_of("binomial", shape, 1) == {}


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1), st.data())
def test_what_is_due_is_as_it_was_told(mark: int, step: int, data: st.DataObject) -> None:
    slot = PlanSlot(mark=mark, step=step, after=data.draw(st.integers(0, step)))
    assert PlanSlot.decode(slot.encode()) == slot


def test_nothing_is_due_after_its_own_step_or_without_end() -> None:
    for slot in (
        PlanSlot(mark=0, step=1, after=2),
        PlanSlot(mark=0, step=2**31, after=0),
        PlanSlot(mark=-1, step=0, after=0),
    ):
        with pytest.raises(ProtocolError):
            slot.encode()
    with pytest.raises(ProtocolError):
        PlanSlot.decode(bytes([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2]))
    with pytest.raises(ProtocolError):
        PlanSlot.decode(bytes([0, 0, 0, 0, 255, 0, 0, 1, 0, 0, 0, 2]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [2, 5, 8])
async def test_all_blocks_come_as_planned(kind: str, nodes: int) -> None:
    async with make_rig(kind, nodes, in_slots=True) as rig:
        rig.start()
        for report in await rig.reports():
            faults = report.faults
            assert (faults.failed, faults.late, faults.replanned) == (0, 0, 0), report


@pytest.mark.parametrize("kind", ["tcp"])
async def test_a_node_that_dies_is_waited_for_no_longer(kind: str) -> None:
    async with make_rig(kind, 6, in_slots=True) as rig:
        rig.start()
        await rig.holds(1, BLOCKS // 4)
        await rig.kill(1)
        await rig.reports()
