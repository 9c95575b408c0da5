"""Who serves during a burst, as it is followed on the change feed."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.scaleout.watch import ServingMonitor, ServingReplica, serving_record
from registry.errors import StateUnavailable
from registry.records.instance import InstanceState
from registry.records.live import LiveMode, LivePipeline, LiveRecord, LiveStage
from registry.redis.state import RedisState
from tests.fixtures.patience import PATIENCE_S, until
from tests.fixtures.redis import RedisServer
from tests.fixtures.registry_records import instance, node

STAGES = (("n1", 0, 5), ("n2", 5, 6))


def record(*pipelines: LivePipeline, serial: int = 1) -> LiveRecord:
    return LiveRecord(
        function="tiny",
        version=1,
        controller_epoch=1,
        serial=serial,
        way=LiveMode.PIPELINE,
        reason="given",
        at=0.0,
        pipelines=pipelines,
    )


def pipeline(
    id_: str, way: LiveMode = LiveMode.PIPELINE, *, stages: Sequence[tuple[str, int, int]] = STAGES
) -> LivePipeline:
    placed = tuple(LiveStage(node=name, instance_id=name, first=a, last=b) for name, a, b in stages)
    head = len(placed) - 1
    return LivePipeline(pipeline_id=id_, epoch=0, stages=placed, head=head, rate=1.5, slots=8, way=way)


async def test_pipelines_and_instances_are_seen_as_they_come_and_go(redis_url: str) -> None:
    started_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S), RedisState.connect(redis_url) as state:
        epoch = await state.next_node_epoch("n0")
        await state.put_node(node("n0", epoch), 60.0)
        await state.put_instance(instance("i0", state=InstanceState.READY), epoch)
        with ServingMonitor(redis_url) as watch:
            reported = (
                pipeline("p"),
                pipeline("pair", LiveMode.ZIGZAG),
                pipeline("lone", stages=[("n3", 0, 6)]),
            )
            await state.put_live(record(*reported), 60.0)
            await until(lambda: len(watch.seen) == 2)
            await state.put_instance(instance("i0", state=InstanceState.STOPPED), epoch)
            await until(lambda: len(watch.seen) == 3)
            await state.put_live(record(serial=2), 60.0)
            await until(lambda: len(watch.seen) == 4)
    seen = watch.seen
    server = ServingReplica(name="p.0", rate=1.5, stages=STAGES)  # neither pair nor lone node
    served = [(one.pipelines, one.ready) for one in seen]
    assert served == [((), ("n0",)), ((server,), ("n0",)), ((server,), ()), ((), ())]
    moments = [one.since(started_s, 2).at_s for one in seen]
    assert moments == sorted(moments) and 0 < moments[-1] <= (time.monotonic() - started_s) / 2
    assert seen[0].since(seen[1].at_s, 2).at_s == 0.0  # before the burst
    assert serving_record(seen[1])["pipelines"] == [{"name": "p.0", "rate": 1.5, "stages": STAGES}]


async def test_who_cannot_follow_to_the_end_says_so(tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S), RedisServer(tmp_path) as server:
        watch = ServingMonitor(server.url)
        with pytest.raises(StateUnavailable):
            with watch:
                await server.kill()
                await until(lambda: watch.failure is not None)
        nobody = ServingMonitor(server.url)
        with pytest.raises(StateUnavailable), nobody:
            raise AssertionError("it follows nobody")
