"""The control loop over fake nodes: scaling, deaths, redeploys, replication, two gateways, no state."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import pytest

from gateway.cluster.state_cache import VersionKey
from gateway.control.assembly import ControlSettings, make_control
from gateway.core.contract import DispatchError, WaitStage
from gateway.fakes.channel import FakeChannel
from gateway.fakes.node import tokens_after
from gateway.planning.policy import ConcurrencyTarget, FunctionLoad, PolicyState, ScalingDecision
from registry.clock import FakeClock
from registry.errors import StateUnavailable
from registry.memory.state import MemoryState
from registry.messages.node import RequestUsage
from registry.records.change import Change, Snapshot
from registry.records.fence import NO_FENCE, Fence
from registry.records.function import FunctionVersion, Scaling, ScalingMode
from registry.records.instance import InstanceState
from registry.records.node import NodeRecord, Tier
from tests.fixtures.control import (
    MIB,
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

QUICK = Scaling(keep_alive_s=0.1, target_concurrency=1)
FAST = ControlSettings(lease_ttl_s=3.0, demand_ttl_s=1.0)
EXPECTED = tokens_after((1, 2, 3), 4)


async def first_holder(cluster: FakeCluster, version: FunctionVersion) -> str:
    """Return the node that keeps the copy in host memory, once there is one."""
    state_cache, image = cluster.control.state_cache, version.image
    assert image is not None
    await cluster.until(lambda: len(state_cache.holders(image, Tier.HOST)) == 1)
    return state_cache.holders(image, Tier.HOST)[0].id


async def test_idle_instances_go_after_keep_alive_and_the_host_copy_stays() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(QUICK)
        await first_holder(cluster, version)
        first = await ask(cluster.control, make_call(version))
        assert first.assigned.start_kind == "warm"  # the deploy left a host copy behind
        await cluster.until_gone()
        assert cluster.counts("stops") == 1
        await ask(cluster.control, make_call(version))
        assert cluster.counts("store_reads") == 1


class CountingPolicy(ConcurrencyTarget):
    """A policy that counts its decisions: one for each version and step."""

    decisions = 0

    def decide(self, load: FunctionLoad, state: PolicyState, now: float) -> ScalingDecision:
        self.decisions += 1
        return super().decide(load, state, now)


async def test_many_changes_are_planned_for_together() -> None:
    policy = CountingPolicy()
    async with open_cluster(1, policy=policy) as cluster:
        version = await cluster.deploy()
        await first_holder(cluster, version)
        before, began_s = policy.decisions, time.monotonic()
        for _ in range(500):
            cluster.control.changes.notify()
            await asyncio.sleep(0)
        assert policy.decisions - before <= (time.monotonic() - began_s) / 0.02 + 2


async def test_load_starts_several_at_once_and_they_go_when_it_ends() -> None:
    async with open_cluster(3, policy=ConcurrencyTarget(stable_s=0.05)) as cluster:
        cluster.hold_tokens()
        version = await cluster.deploy(QUICK)
        calls = [asyncio.create_task(ask(cluster.control, make_call(version))) for _ in range(3)]
        await cluster.until_ready(3)
        assert cluster.counts("starts") == 3
        cluster.give_tokens()
        assert [(await call).ids for call in calls] == [EXPECTED] * 3
        await cluster.until_gone()


async def test_every_deployed_image_gets_a_host_copy_and_gets_it_again_when_the_node_dies() -> None:
    async with open_cluster(3) as cluster:
        version = await cluster.deploy()
        dead = await first_holder(cluster, version)
        assert cluster.counts("warms") == 1
        holders = lambda: cluster.control.state_cache.holders(version.image or "", Tier.HOST)  # noqa: E731
        await cluster.nodes[dead].kill()
        await cluster.until(lambda: {n.id for n in holders()} - {dead} != set())


async def let_copies_idle(cluster: FakeCluster) -> None:
    """Let the copies of all nodes be used last long ago."""
    for node in cluster.nodes.values():
        holdings = tuple(replace(h, last_used_at=1.0) for h in node.record.holdings)
        node._record = replace(node.record, holdings=holdings)
        await node.beat()


async def test_surplus_host_copies_go_when_idle_but_never_the_last() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(Scaling(host_keep_alive_s=0.0))
        assert version.image is not None
        async for _ in cluster.control.cluster.warm("f", 2, ()):
            pass
        await let_copies_idle(cluster)
        await cluster.until(lambda: len(cluster.control.state_cache.holders(version.image, Tier.HOST)) == 1)
        assert cluster.counts("drops") == 1


async def test_no_host_copy_is_kept_of_a_function_that_asks_for_none() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(Scaling(host_keep_alive_s=0.0, host_copies=0, keep_alive_s=0.0))
        assert version.image is not None
        await ask(cluster.control, make_call(version))
        assert cluster.counts("warms") == 0
        await cluster.until_gone()
        await let_copies_idle(cluster)
        await cluster.until(lambda: not cluster.control.state_cache.holders(version.image, Tier.HOST))


async def test_a_pinned_copy_is_dropped_once_its_function_asks_for_none() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(Scaling(host_keep_alive_s=0.0))
        assert version.image is not None
        await first_holder(cluster, version)
        head = await cluster.state.function("f")
        await cluster.state.set_scaling("f", replace(head.scaling, host_copies=0))
        await let_copies_idle(cluster)
        await cluster.until(lambda: not cluster.control.state_cache.holders(version.image, Tier.HOST))


async def test_a_dead_nodes_calls_go_to_a_new_instance() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(Scaling(max_instances=1))
        first = await ask(cluster.control, make_call(version))
        await cluster.nodes[first.assigned.node].kill()
        second = await ask(cluster.control, make_call(version))
        assert second.ids == EXPECTED
        assert second.assigned.node != first.assigned.node


async def test_a_node_whose_channel_only_broke_is_dialled_again() -> None:
    async with open_cluster(1) as cluster:
        version = await cluster.deploy()
        await ask(cluster.control, make_call(version))
        await cluster.nodes["n0"].cut()
        again = await ask(cluster.control, make_call(version))
        assert again.ids == EXPECTED
        assert cluster.counts("starts") == 1


async def test_a_redeploy_under_load_fails_no_call_and_replaces_the_instances() -> None:
    async with open_cluster(2) as cluster:
        scaling = Scaling(keep_alive_s=30.0, target_concurrency=2)
        old = await cluster.deploy(scaling)
        await cluster.control.cluster.scale("f", 1, (), wait=True)
        served: list[int] = []
        stop = asyncio.Event()

        async def client(number: int) -> None:
            while not stop.is_set():
                current = cluster.control.state_cache.current("f")
                assert current is not None
                call = make_call(current, request_id=f"c{number}-{len(served)}")
                assert (await ask(cluster.control, call)).ids == EXPECTED
                served.append(current.version)

        clients = [asyncio.create_task(client(number)) for number in range(3)]
        await asyncio.gather(*(cluster.nodes[i.node].served(10) for i in cluster.ready()))
        gate = [node.loading for node in cluster.nodes.values()]
        for one in gate:
            one.close()
        new = await cluster.deploy(scaling, image="image-2")
        await asyncio.wait(
            [asyncio.create_task(one.arrived()) for one in gate], return_when="FIRST_COMPLETED"
        )
        key = VersionKey("f", old.version)
        assert cluster.control.state_cache.ready(key)  # the old one stays until the new one is ready
        for one in gate:
            one.open()
        await cluster.until(lambda: not cluster.control.state_cache.instances(key))
        await asyncio.gather(*(cluster.nodes[i.node].served(20) for i in cluster.ready()))
        stop.set()
        await asyncio.gather(*clients)
        assert served[-1] == new.version
        assert {i.version for i in cluster.ready()} == {new.version}


async def test_a_call_on_the_old_version_ends_there() -> None:
    async with open_cluster(2) as cluster:
        old = await cluster.deploy(Scaling(keep_alive_s=30.0))
        await cluster.control.cluster.scale("f", 1, (), wait=True)
        cluster.hold_tokens()
        running = asyncio.create_task(ask(cluster.control, make_call(old)))
        await cluster.until(lambda: cluster.control.stats().in_flight == 1)
        new = await cluster.deploy(image="image-2")
        await cluster.until(lambda: bool(cluster.control.state_cache.ready(VersionKey("f", new.version))))
        cluster.give_tokens()
        assert (await running).ids == EXPECTED
        await cluster.until(lambda: not cluster.control.state_cache.instances(VersionKey("f", old.version)))
        pinned = await ask(cluster.control, make_call(old))  # an old version may still be called
        assert pinned.ids == EXPECTED


async def test_an_idle_function_makes_room_for_one_with_calls() -> None:
    async with open_cluster(1, gpu_bytes=3 * MIB) as cluster:
        first = await cluster.deploy(nbytes=2 * MIB)
        second = await cluster.deploy(name="g", image="image-2", nbytes=2 * MIB)
        await ask(cluster.control, make_call(first))
        assert (await ask(cluster.control, make_call(second))).ids == EXPECTED
        assert cluster.ready("f") == []


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
        holder = await first_holder(cluster, version)
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


async def test_growing_load_is_decided_within_a_tenth_of_a_second() -> None:
    """From the arrival of calls to the number of instances, in an idle process."""
    async with open_cluster(4) as cluster:
        version = await cluster.deploy(Scaling(policy=ScalingMode.LOAD, keep_alive_s=60.0))
        await ask(cluster.control, make_call(version))
        cluster.hold_tokens()
        key, loop = VersionKey("f", 1), asyncio.get_running_loop()
        best_s, waiting = 1.0, list[asyncio.Task[Answer]]()
        for burst in range(3):  # another process may delay one of them
            started = cluster.counts("starts")
            begun_s = loop.time()
            calls = [
                asyncio.create_task(ask(cluster.control, make_call(version, request_id=f"{burst}-{number}")))
                for number in range(9)
            ]
            await cluster.until(lambda count=started: cluster.counts("starts") > count)
            best_s = min(best_s, loop.time() - begun_s)
            assert cluster.control.stats().desired[str(key)] == 2 + burst
            if burst < 2:
                await cluster.until_ready(2 + burst)
            waiting += calls
        cluster.give_tokens()
        await asyncio.gather(*waiting)
        assert best_s < 0.1
        decision = await cluster.state.scaling_record("f")
        assert decision is not None and "as no instance was seen at work yet" in decision.reason
