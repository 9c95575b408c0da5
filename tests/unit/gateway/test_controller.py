"""The control loop over fake nodes: scaling, deaths, redeploys, replication."""

import asyncio
import time
from dataclasses import replace

from gateway.cluster.state_cache import VersionKey
from gateway.planning.policy import ConcurrencyTarget, FunctionLoad, PolicyState, ScalingDecision
from registry.records.function import Scaling, ScalingMode
from registry.records.node import Tier
from tests.fixtures.control import (
    EXPECTED,
    MIB,
    QUICK,
    Answer,
    FakeCluster,
    ask,
    make_call,
    open_cluster,
)


async def test_idle_instances_go_after_keep_alive_and_the_host_copy_stays() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(QUICK)
        await cluster.first_holder(version)
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
        await cluster.first_holder(version)
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
        dead = await cluster.first_holder(version)
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


async def test_pulled_folders_go_with_the_copies_of_a_deleted_function() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(Scaling(host_keep_alive_s=0.0))
        assert version.image is not None
        for name in cluster.nodes:
            [step async for step in cluster.control.cluster.pull("f", name)]
        await cluster.state.delete_function("f")
        await let_copies_idle(cluster)
        await cluster.until(lambda: not cluster.control.state_cache.holders(version.image, Tier.HOST))
        assert not any(node.folders for node in cluster.nodes.values())


async def test_a_pinned_copy_is_dropped_once_its_function_asks_for_none() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(Scaling(host_keep_alive_s=0.0))
        assert version.image is not None
        await cluster.first_holder(version)
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
