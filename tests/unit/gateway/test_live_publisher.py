"""The publication of live serving: when, for how long, and what is discarded."""

import asyncio
import itertools

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.live.policy import LiveDecision
from gateway.live.publisher import LiveStatePublisher
from registry.clock import FakeClock
from registry.records.change import FunctionChanged
from registry.records.function import Function
from registry.records.live import InstanceRole, LiveMode, LivePipeline, LiveStage
from tests.fixtures.control import make_version
from tests.fixtures.loops import in_virtual_time
from tests.fixtures.recording_state import RecordingState


def pipeline(id_: str) -> LivePipeline:
    stages = (
        LiveStage(node="a", instance_id=f"{id_}-a", first=0, last=1),
        LiveStage(node="b", instance_id=f"{id_}-b", first=1, last=2),
    )
    return LivePipeline(pipeline_id=id_, epoch=0, stages=stages, head=1, rate=1.5, slots=8)


def decision(reason: str) -> LiveDecision:
    return LiveDecision(way=LiveMode.PIPELINE, reason=reason)


@in_virtual_time
async def test_the_end_of_a_deleted_functions_last_pipelines_is_published() -> None:
    state, key = RecordingState(), VersionKey("deleted", 1)
    publisher = LiveStatePublisher(state, ClusterStateCache(), ChangeCondition(), FakeClock(), lambda: 1)
    publisher.put_pipeline(key, pipeline("p"))
    publisher.put_pipeline(key, pipeline("q"))
    state.gate.clear()
    publishing = asyncio.create_task(publisher.run())
    await state.asked.wait()
    publisher.remove_pipeline(key, "p")
    publisher.remove_pipeline(key, "q")
    state.gate.set()
    await state.until(lambda: len(state.reported) == 2)
    assert [len(record.pipelines) for record in state.reported] == [2, 0]
    publisher.put_pipeline(VersionKey("other", 1), pipeline("r"))
    await state.renewed("other")
    assert state.times("deleted") == 2
    assert not publishing.done() and "deleted" not in repr(publisher)
    publishing.cancel()


@in_virtual_time
async def test_roles_are_published_when_they_change_and_kept_by_the_next_controller() -> None:
    state, key = RecordingState(), VersionKey("f", 1)
    publisher = LiveStatePublisher(state, ClusterStateCache(), ChangeCondition(), FakeClock(), lambda: 1)
    publishing = asyncio.create_task(publisher.run())
    publisher.set_roles(key, {})
    for _ in range(2):
        publisher.set_roles(key, {"i0": InstanceRole.PREFILL, "i1": InstanceRole.DECODE})
    await state.until(lambda: len(state.reported) == 1)
    (record,) = state.reported
    assert record.roles == {"i0": InstanceRole.PREFILL, "i1": InstanceRole.DECODE}
    publisher.set_roles(key, {})
    await state.until(lambda: len(state.reported) == 2)
    assert state.reported[-1].roles == {}
    publishing.cancel()
    later = LiveStatePublisher(state, ClusterStateCache(), ChangeCondition(), FakeClock(), lambda: 2)
    later.recover(record)
    publishing = asyncio.create_task(later.run())
    await state.until(lambda: len(state.reported) == 3)
    assert state.reported[-1].roles == record.roles
    publishing.cancel()


@in_virtual_time
async def test_a_pipeline_is_renewed_however_much_others_change() -> None:
    state, quiet, busy = RecordingState(), VersionKey("quiet", 1), VersionKey("busy", 1)
    publisher = LiveStatePublisher(state, ClusterStateCache(), ChangeCondition(), FakeClock(), lambda: 1)
    publishing = asyncio.create_task(publisher.run())
    publisher.put_pipeline(quiet, pipeline("p"))
    loop, seconds = asyncio.get_running_loop(), itertools.count()

    def change() -> None:  # sooner than what is quiet is renewed
        publisher.set_decision(busy, decision(f"the {next(seconds)}th"))
        loop.call_later(1.0, change)

    change()
    for _ in range(3):
        await state.renewed("quiet")
    publishing.cancel()


@in_virtual_time
async def test_decisions_on_versions_that_are_current_no_more_are_forgotten() -> None:
    state_cache = ClusterStateCache()
    function = Function(name="f", current=2, versions=(1, 2), created_at=0.0)
    state_cache.apply(FunctionChanged(function=function, version=make_version(version=2)), 0.0)
    state = RecordingState()
    publisher = LiveStatePublisher(state, state_cache, ChangeCondition(), FakeClock(), lambda: 1)
    publishing = asyncio.create_task(publisher.run())
    publisher.put_pipeline(VersionKey("f", 1), pipeline("p"))
    publisher.set_decision(VersionKey("f", 2), decision("the new one"))
    publisher.put_pipeline(VersionKey("other", 1), pipeline("r"))
    await state.renewed("other")
    assert "f:1" in repr(publisher) and "f:2" in repr(publisher)  # one serves by pipelines still
    publisher.remove_pipeline(VersionKey("f", 1), "p")
    await state.renewed("other")
    assert "f:1" not in repr(publisher) and "'f:2': []" in repr(publisher)
    publishing.cancel()
