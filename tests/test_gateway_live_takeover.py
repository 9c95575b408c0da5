"""What a controller makes of the records that another one left."""

import asyncio
from dataclasses import replace

from control_fixture import AnyBlobs, make_instance, make_node, make_version
from telling_state_fixture import TellingState
from virtual_time_fixture import run_in_virtual_time

from gateway.actions import StartOn
from gateway.directory import Directory, VersionKey
from gateway.live import LiveServing
from gateway.live_board import TTL_S, LiveBoard
from gateway.live_policy import LiveDecision
from gateway.plan import Plan
from gateway.start_assets import StartAssets
from gateway.wakeup import Wakeup
from registry.change import FunctionChanged, InstanceChanged, LiveChanged, NodeUp
from registry.clock import FakeClock
from registry.function import Function, Scaling
from registry.instance import InstanceState
from registry.live import Live, LivePipeline, LiveRecord, LiveStage

KEY = VersionKey("f", 1)
STAGES = (
    LiveStage(node="n0", instance_id="i-n0", first=0, last=5),
    LiveStage(node="n1", instance_id="i-n1", first=5, last=6),
)
PIPELINE = LivePipeline(pipeline_id="p", epoch=0, stages=STAGES, head=1, rate=1.0, slots=8)


class NoLinks:
    """Links of a gateway that reaches nobody."""

    def client(self, node: str) -> None:
        return None

    def lost(self, node: str) -> None:
        pass


class Gateway:
    """What a controller knows and tells of live serving; `epoch` is that of its lease."""

    def __init__(self) -> None:
        self.state = TellingState()
        self.directory = Directory()
        self.epoch: int | None = 1
        self.board = LiveBoard(self.state, self.directory, Wakeup(), FakeClock(), lambda: self.epoch)
        self.live = LiveServing(self.directory, NoLinks(), StartAssets(AnyBlobs()), self.board)

    def hear(self, epoch: int, *pipelines: LivePipeline, way: Live = Live.OFF) -> None:
        """Another controller tells."""
        record = LiveRecord(
            function="f",
            version=1,
            controller_epoch=epoch,
            serial=1,
            way=way,
            reason="told",
            at=0.0,
            pipelines=pipelines,
        )
        self.directory.apply(LiveChanged(record=record, ttl_s=TTL_S), 0.0)


def test_who_leads_again_tells_nothing_of_what_another_one_ended() -> None:
    async def main() -> None:
        gateway = Gateway()
        publishing = asyncio.create_task(gateway.live.run())
        gateway.live.plan(Plan(), {}, 1)
        gateway.board.decided(KEY, LiveDecision(way=Live.PIPELINE, reason="ours"))
        gateway.board.put(KEY, PIPELINE)
        gateway.epoch = None
        gateway.hear(2)
        gateway.live.rest()
        gateway.epoch = 3
        gateway.live.plan(Plan(), {}, 3)
        gateway.board.put(VersionKey("other", 1), PIPELINE)
        await gateway.state.renewed("other")
        assert {record.function for record in gateway.state.told} == {"other"}
        publishing.cancel()

    run_in_virtual_time(main())


def test_who_is_helped_by_a_pair_that_was_taken_over_is_not_helped_by_another() -> None:
    async def main() -> None:
        gateway, version = Gateway(), make_version()
        directory = gateway.directory
        for name in ("n0", "n1", "n2"):
            directory.apply(NodeUp(record=make_node(name), ttl_s=60.0), 0.0)
            directory.reach(name, 1)
        function = Function(name="f", current=1, versions=(1,), scaling=Scaling(live=Live.ZIGZAG))
        directory.apply(FunctionChanged(function=function, version=version), 0.0)
        loading = make_instance("i-n0", "n0", state=InstanceState.LOADING)
        for instance in (loading, make_instance("i-n1", "n1")):
            directory.apply(InstanceChanged(record=instance), 0.0)
        gateway.hear(1, replace(PIPELINE, way=Live.ZIGZAG), way=Live.ZIGZAG)
        start = StartOn(instance_id="i-n2", version=version, node="n2", holders=(), max_concurrency=8)
        plan = Plan(actions=[start])
        gateway.epoch = 2
        gateway.live.plan(plan, {}, 2)
        (start,) = plan.actions
        start = await gateway.live.begin(start)
        gateway.live.heard(start, b"\x01")
        assert "<ZigZagPairs [], 1 load, 0 are ready>" in repr(gateway.live)
        directory.apply(InstanceChanged(record=replace(loading, state=InstanceState.READY)), 0.0)
        gateway.live.plan(Plan(), {}, 2)  # the pair ends
        gateway.live.plan(Plan(), {}, 2)
        assert "1 load, 2 are ready>" in repr(gateway.live) and "way=<Live.ZIGZAG" in repr(gateway.live)

    asyncio.run(main())
