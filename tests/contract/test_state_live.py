"""What every State promises of live records: the latest of each function version, for as long as it holds."""

from dataclasses import replace

from registry.records.change import LiveChanged
from registry.records.live import InstanceRole, LiveMode, LivePipeline, LiveRecord, LiveStage, LiveSwitch
from registry.state import State
from tests.fixtures.state import LAPSE_S, Lapse, after

PIPELINE = LivePipeline(
    pipeline_id="p1",
    epoch=2,
    stages=(
        LiveStage(node="n0", instance_id="i0", first=0, last=3),
        LiveStage(node="n1", instance_id="i1", first=3, last=6),
    ),
    head=1,
    rate=1.74,
    slots=13,
    switched=(LiveSwitch(instance_id="i0", sharers=2),),
)
RECORD = LiveRecord(
    function="tiny",
    version=1,
    controller_epoch=3,
    serial=7,
    way=LiveMode.PIPELINE,
    reason="live is pipeline",
    at=1.5,
    pipelines=(PIPELINE,),
    roles={"i2": InstanceRole.PREFILL, "i3": InstanceRole.DECODE},
)


async def test_a_live_record_is_told_in_feed_and_snapshot(state: State):
    cursor = (await state.snapshot()).cursor
    other = replace(RECORD, version=2, pipelines=())
    await state.put_live(other, 60.0)
    await state.put_live(RECORD, 60.0)
    changes = await after(state, cursor, 2)
    assert changes == [LiveChanged(record=other, ttl_s=60.0), LiveChanged(record=RECORD, ttl_s=60.0)]
    found = (await state.snapshot()).live
    assert [change.record for change in found] == [RECORD, other]
    assert all(0 < change.ttl_s <= 60.0 for change in found)
    assert RECORD.pipelines[0].name == "p1.2"


async def test_an_older_record_changes_nothing_and_one_told_again_holds_for_longer(state: State):
    await state.put_live(RECORD, 60.0)
    cursor = (await state.snapshot()).cursor
    await state.put_live(replace(RECORD, serial=6), 60.0)
    await state.put_live(replace(RECORD, controller_epoch=2, serial=9), 60.0)
    await state.put_live(RECORD, 90.0)
    later = replace(RECORD, controller_epoch=4, serial=0, pipelines=())
    await state.put_live(later, 60.0)
    assert await after(state, cursor, 2) == [
        LiveChanged(record=RECORD, ttl_s=90.0),
        LiveChanged(record=later, ttl_s=60.0),
    ]
    assert [change.record for change in (await state.snapshot()).live] == [later]


async def test_a_live_record_lapses(lapsing_state: tuple[State, Lapse]):
    state, lapse = lapsing_state
    await state.put_live(RECORD, LAPSE_S)
    await lapse()
    assert (await state.snapshot()).live == ()
    await state.put_live(replace(RECORD, controller_epoch=1, serial=0), 60.0)  # nothing is known of it
    assert len((await state.snapshot()).live) == 1
