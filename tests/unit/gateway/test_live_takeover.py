"""What a controller makes of the records that another one left."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.start_assets import StartAssets
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.live.coordinator import LiveCoordinator
from gateway.live.policy import LiveDecision
from gateway.live.publisher import TTL_S, LiveStatePublisher
from gateway.planning.actions import StartAction
from gateway.planning.plan import Plan
from registry.clock import FakeClock
from registry.messages.node import InstanceProgress
from registry.records.change import FunctionChanged, InstanceChanged, LiveChanged, NodeUp
from registry.records.function import Function, Scaling
from registry.records.instance import InstanceState
from registry.records.live import InstanceRole, LiveMode, LivePipeline, LiveRecord, LiveStage
from tests.fixtures.control import AnyBlobs, make_instance, make_node, make_version
from tests.fixtures.loops import in_virtual_time
from tests.fixtures.recording_state import RecordingState

KEY = VersionKey("f", 1)
STAGES = (
    LiveStage(node="n0", instance_id="i-n0", first=0, last=5),
    LiveStage(node="n1", instance_id="i-n1", first=5, last=6),
)
NO_ROLES: Mapping[str, InstanceRole] = {}
PIPELINE = LivePipeline(pipeline_id="p", epoch=0, stages=STAGES, head=1, rate=1.0, slots=8)


class NoLinks:
    """Channels of a gateway that reaches no node."""

    def client(self, node: str) -> None:
        return None

    def lost(self, node: str) -> None:
        pass


class Gateway:
    """The live serving of one controller; `epoch` is that of its lease."""

    def __init__(self) -> None:
        self.state = RecordingState()
        self.state_cache = ClusterStateCache()
        self.epoch: int | None = 1
        self.board = LiveStatePublisher(
            self.state, self.state_cache, ChangeCondition(), FakeClock(), lambda: self.epoch
        )
        self.live = LiveCoordinator(
            self.state_cache, NoLinks(), StartAssets(AnyBlobs()), self.board, FakeClock()
        )

    def receive(
        self,
        epoch: int,
        *pipelines: LivePipeline,
        way: LiveMode = LiveMode.OFF,
        roles: Mapping[str, InstanceRole] = NO_ROLES,
    ) -> None:
        """Receive a record of another controller."""
        record = LiveRecord(
            function="f",
            version=1,
            controller_epoch=epoch,
            serial=1,
            way=way,
            reason="published",
            at=0.0,
            pipelines=pipelines,
            roles=roles,
        )
        self.state_cache.apply(LiveChanged(record=record, ttl_s=TTL_S), 0.0)


@in_virtual_time
async def test_a_controller_that_leads_again_discards_its_old_records() -> None:
    gateway = Gateway()
    publishing = asyncio.create_task(gateway.live.run())
    gateway.live.plan(Plan(), {}, 1)
    gateway.board.set_decision(KEY, LiveDecision(way=LiveMode.PIPELINE, reason="ours"))
    gateway.board.put_pipeline(KEY, PIPELINE)
    gateway.epoch = None
    gateway.receive(2)
    gateway.live.stand_down()
    gateway.epoch = 3
    gateway.live.plan(Plan(), {}, 3)
    gateway.board.put_pipeline(VersionKey("other", 1), PIPELINE)
    await gateway.state.renewed("other")
    assert {record.function for record in gateway.state.reported} == {"other"}
    publishing.cancel()


async def test_a_controller_continues_with_the_roles_of_an_earlier_one() -> None:
    gateway = Gateway()
    roles = {"i-n0": InstanceRole.PREFILL, "i-n1": InstanceRole.DECODE}
    gateway.receive(1, roles=roles)
    gateway.epoch = 2
    gateway.live.plan(Plan(roles={KEY: roles}), {}, 2)
    known = gateway.state_cache.live.record("f", 1)
    assert known is not None and (known.reason, known.roles) == ("published", roles)
    gateway.live.plan(Plan(roles={KEY: {}}), {}, 2)  # it is colocated, or has one instance
    assert gateway.state_cache.live.roles("f", 1) == {}


async def test_a_source_of_a_recovered_pair_is_in_no_other_pair() -> None:
    gateway, version = Gateway(), make_version()
    state_cache = gateway.state_cache
    for name in ("n0", "n1", "n2"):
        state_cache.apply(NodeUp(record=make_node(name), ttl_s=60.0), 0.0)
        state_cache.channel_up(name, 1)
    function = Function(name="f", current=1, versions=(1,), scaling=Scaling(live=LiveMode.ZIGZAG))
    state_cache.apply(FunctionChanged(function=function, version=version), 0.0)
    loading = make_instance("i-n0", "n0", state=InstanceState.LOADING)
    for instance in (loading, make_instance("i-n1", "n1")):
        state_cache.apply(InstanceChanged(record=instance), 0.0)
    gateway.receive(1, replace(PIPELINE, way=LiveMode.ZIGZAG), way=LiveMode.ZIGZAG)
    start = StartAction(instance_id="i-n2", version=version, node="n2", holders=(), max_concurrency=8)
    plan = Plan(actions=[start])
    gateway.epoch = 2
    gateway.live.plan(plan, {}, 2)
    (start,) = plan.actions
    start = await gateway.live.prepare_start(start)
    gateway.live.on_progress(start, InstanceProgress(stage="fetch", fraction=0.1, held=b"\x01"))
    assert "<PairGroup [], 1 load, 0 are ready>" in repr(gateway.live)
    state_cache.apply(InstanceChanged(record=replace(loading, state=InstanceState.READY)), 0.0)
    gateway.live.plan(Plan(), {}, 2)  # the pair ends
    gateway.live.plan(Plan(), {}, 2)
    assert "1 load, 2 are ready>" in repr(gateway.live) and "way=<LiveMode.ZIGZAG" in repr(gateway.live)
