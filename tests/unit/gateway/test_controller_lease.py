"""The lease of the control loop: two gateways, takeovers, and what holds without the state."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import pytest

from gateway.cluster.state_cache import VersionKey
from gateway.control.assembly import make_control
from gateway.core.contract import DispatchError, WaitStage
from gateway.fakes.channel import FakeChannel
from gateway.planning.policy import FunctionLoad, PolicyState, ScalingDecision
from registry.clock import FakeClock
from registry.errors import StateUnavailable
from registry.memory.state import MemoryState
from registry.messages.node import RequestUsage
from registry.records.change import Change, ScaleTarget, Snapshot
from registry.records.fence import NO_FENCE, Fence
from registry.records.function import FunctionVersion, Scaling, ScalingMode
from registry.records.instance import InstanceState
from registry.records.node import NodeRecord
from tests.fixtures.control import (
    EXPECTED,
    FAST,
    Answer,
    AnyBlobs,
    FakeCluster,
    ask,
    digest,
    make_call,
    make_version,
    open_cluster,
    open_gateway,
)
from tests.fixtures.patience import PATIENCE_S


async def test_one_of_two_gateways_controls_and_the_other_takes_over() -> None:
    async with open_cluster(2, settings=FAST) as cluster:
        async with open_gateway(cluster, "g1", FAST) as other:
            version = await cluster.deploy(Scaling(target_concurrency=1, max_instances=1))
            await cluster.until(lambda: cluster.control.stats().controller_epoch == 1)
            await other.changes.wait_for(lambda: other.state_cache.current("f") == version)
            answer = await ask(other, make_call(version))  # its demand goes through the state
            assert answer.ids == EXPECTED
            assert cluster.counts("starts") == 1
            assert other.stats().controller_epoch is None


async def test_the_lease_passes_on_when_its_holder_stops() -> None:
    async with open_cluster(1, gateways=0) as cluster:
        async with open_gateway(cluster, "second", FAST) as second:
            async with open_gateway(cluster, "late", FAST) as late:
                await second.changes.wait_for(lambda: second.stats().controller_epoch is not None)
                assert late.stats().controller_epoch is None
        version = await cluster.state.create_version(make_version(), None)
        async with open_gateway(cluster, "third", FAST) as third:
            await third.changes.wait_for(lambda: third.stats().controller_epoch == 2)
            await third.changes.wait_for(lambda: third.state_cache.current("f") is not None)
            assert (await ask(third, make_call(version))).ids == EXPECTED


async def test_a_gateway_carries_out_a_scale_request_from_before_its_start() -> None:
    async with open_cluster(2, gateways=0) as cluster:
        version = await cluster.state.create_version(make_version(), None)
        await cluster.state.request_scale(ScaleTarget(function="f", instances=2, token="t"))
        async with open_gateway(cluster, "g0", FAST) as control, asyncio.timeout(PATIENCE_S):
            key = VersionKey("f", version.version)
            await control.changes.wait_for(lambda: len(control.state_cache.ready(key)) == 2)


async def test_a_held_call_is_served_after_a_takeover() -> None:
    async with open_cluster(0, gateways=0) as cluster, AsyncExitStack() as stack:
        version = await cluster.state.create_version(make_version(), None)
        async with open_gateway(cluster, "first", FAST) as first:
            await first.changes.wait_for(lambda: first.stats().controller_epoch is not None)
            second = await stack.enter_async_context(open_gateway(cluster, "second", FAST))
            held = asyncio.create_task(ask(second, make_call(version)))
            await first.changes.wait_for(lambda: any(first.state_cache.load_reports()))
        await cluster.add_node("n0")
        assert (await held).ids == EXPECTED
        assert second.stats().controller_epoch == 2


async def test_who_begins_to_lead_stops_nothing_that_is_asked_for() -> None:
    settings = replace(FAST, link_bytes_s=1e6)  # by which a growing demand waits for a moment
    async with open_cluster(3, gateways=0) as cluster, AsyncExitStack() as stack:
        async with open_gateway(cluster, "first", settings) as first:
            await first.changes.wait_for(lambda: first.stats().controller_epoch is not None)
            second = await stack.enter_async_context(open_gateway(cluster, "second", settings))
            cluster.gateways.append(second)
            version = await cluster.deploy(Scaling(keep_alive_s=0.0, target_concurrency=1))
            cluster.hold_tokens()
            asked = [
                asyncio.create_task(ask(second, make_call(version, request_id=f"c{number}")))
                for number in range(3)
            ]
            await cluster.until_ready(3)
            await second.changes.wait_for(lambda: second.stats().in_flight == 3)
        await second.changes.wait_for(lambda: list(second.stats().desired.values()) == [3])
        assert len(second.state_cache.ready(VersionKey("f", 1))) == 3
        cluster.give_tokens()
        assert [answer.ids for answer in await asyncio.gather(*asked)] == [EXPECTED] * 3


async def test_who_begins_to_lead_decides_once_the_nodes_are_reached() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        holder = await cluster.first_holder(version)
    reached = asyncio.Event()

    async def dial(record: NodeRecord) -> FakeChannel:
        if record.id == holder:
            await reached.wait()
        return await cluster.net.dial(record)

    async with make_control(
        state=cluster.state,
        blobs=AnyBlobs(),  # type: ignore[arg-type]
        dial=dial,
        gateway_id="late",
        clock=FakeClock(),
    ) as late:
        await late.changes.wait_for(lambda: len(list(late.state_cache.usable_nodes())) == 1)
        await late.changes.wait_for(lambda: late.stats().controller_epoch == 2)
        held = asyncio.create_task(ask(late, make_call(version)))
        await late.changes.wait_for(lambda: late.stats().held == 1)
        reached.set()
        answer = await held
        assert (answer.assigned.node, answer.assigned.start_kind) == (holder, "warm")


class AwayState(MemoryState):
    """A state that can be away: then every call raises, and watchers are cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = asyncio.Event()

    def _check(self) -> None:
        if self.gone.is_set():
            raise StateUnavailable("away")

    async def acquire_lease(
        self, name: str, holder: str, ttl_s: float, *, beyond: Fence = NO_FENCE
    ) -> Fence | None:
        self._check()
        return await super().acquire_lease(name, holder, ttl_s, beyond=beyond)

    async def snapshot(self) -> Snapshot:
        self._check()
        return await super().snapshot()

    async def watch(self, cursor: str) -> AsyncIterator[tuple[str, Change]]:
        feed = super().watch(cursor)
        while True:
            self._check()
            step = asyncio.ensure_future(anext(feed))
            gone = asyncio.ensure_future(self.gone.wait())
            try:
                await asyncio.wait({step, gone}, return_when=asyncio.FIRST_COMPLETED)
                self._check()
                yield step.result()
            finally:
                for task in (step, gone):
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task


async def test_while_the_state_is_away_routes_keep_serving_and_starts_wait() -> None:
    state = AwayState()
    async with open_cluster(2, settings=FAST, state=state) as cluster:
        version = await cluster.deploy(Scaling(keep_alive_s=60.0))
        other = await cluster.deploy(name="g", image="image-2")
        await ask(cluster.control, make_call(version))
        state.gone.set()
        await cluster.until(lambda: not cluster.control.stats().state_alive)
        assert (await ask(cluster.control, make_call(version))).ids == EXPECTED
        starts = cluster.counts("starts")
        async with cluster.control.dispatcher.run(make_call(other)) as events:
            assert isinstance(await anext(events), WaitStage)
            assert (cluster.control.stats().held, cluster.counts("starts")) == (1, starts)
            state.gone.clear()
            assert isinstance([event async for event in events][-1], RequestUsage)


class Fixed:
    """A policy that wants a number of instances which the test sets."""

    desired = 2

    def decide(self, load: FunctionLoad, state: PolicyState, now: float) -> ScalingDecision:
        return ScalingDecision(desired=min(self.desired, load.cap), reason="set", state=PolicyState())


async def pause_one(
    cluster: FakeCluster, policy: Fixed, version: FunctionVersion
) -> list[asyncio.Task[Answer]]:
    """Leave one of two instances of `f` paused, each with a call of the first gateway."""
    await cluster.until_ready(2)
    cluster.hold_tokens()
    calls = [
        asyncio.create_task(ask(cluster.control, make_call(version, request_id=f"p{number}")))
        for number in range(2)
    ]
    await cluster.until(lambda: cluster.control.stats().in_flight == 2)
    policy.desired = 1
    cluster.control.changes.notify()
    await cluster.until(lambda: len(cluster.control.state_cache.ready(VersionKey("f", 1))) == 1)
    assert cluster.counts("stops") == 0
    return calls


async def test_a_paused_instance_serves_again_once_its_gateway_does_not_lead() -> None:
    state, policy = AwayState(), Fixed()
    async with open_cluster(2, settings=FAST, state=state, policy=policy) as cluster:
        version = await cluster.deploy(Scaling(policy=ScalingMode.LOAD))
        calls = await pause_one(cluster, policy, version)
        policy.desired = 2  # for the next controller
        state.gone.set()
        await cluster.until(lambda: len(cluster.control.state_cache.ready(VersionKey("f", 1))) == 2)
        cluster.give_tokens()
        assert [answer.ids for answer in await asyncio.gather(*calls)] == [EXPECTED] * 2
        state.gone.clear()
        await cluster.until(lambda: cluster.control.stats().state_alive)
        assert len(cluster.ready()) == 2


async def test_calls_of_another_gateway_on_a_paused_instance_are_served() -> None:
    policy = Fixed()
    async with open_cluster(2, settings=FAST, policy=policy) as cluster:
        await cluster.until(lambda: cluster.control.stats().controller_epoch == 1)
        async with open_gateway(cluster, "g1", FAST, policy) as other:
            cluster.gateways.append(other)
            version = await cluster.deploy(Scaling(policy=ScalingMode.LOAD))
            calls = await pause_one(cluster, policy, version)
            await other.changes.wait_for(lambda: len(other.state_cache.ready(VersionKey("f", 1))) == 2)
            calls += [
                asyncio.create_task(ask(other, make_call(version, request_id=f"o{number}")))
                for number in range(2)
            ]
            await other.changes.wait_for(lambda: other.stats().in_flight == 2)
            cluster.give_tokens()
            assert [answer.ids for answer in await asyncio.gather(*calls)] == [EXPECTED] * 4
            await cluster.until_ready(1)  # its own calls have ended: it is stopped
            assert (await ask(other, make_call(version))).ids == EXPECTED
            cluster.gateways.remove(other)


async def test_a_lost_lease_lets_a_node_expire_from_routing() -> None:
    async with open_cluster(1, ttl_s=1.0) as cluster:
        version = await cluster.deploy()
        assert version.image == digest("image-1")
        await cluster.until(lambda: not cluster.control.state_cache.nodes())
        assert [i.state for i in cluster.ready() if i.state is InstanceState.READY] == []
        with pytest.raises(DispatchError, match="no usable node"):
            await cluster.control.cluster.scale("f", 1, (), wait=True)
