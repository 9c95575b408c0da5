"""The averages of calls that move: each counts once, with its whole prompt, output and time."""

import asyncio

from registry.clock import FakeClock
from registry.records.change import VersionLoad
from registry.records.function import FunctionVersion, Scaling
from registry.records.live import InstanceRole, LiveMode
from tests.fixtures.control import FakeCluster, ask, make_call, open_cluster
from tests.fixtures.loading import HIGH, LOW, PROMPT, Asking, loading_cluster
from tests.fixtures.patience import until
from tests.fixtures.roles import disaggregated


async def averages(cluster: FakeCluster, version: FunctionVersion, calls: int) -> tuple[VersionLoad, int]:
    """Return the load that is reported after these calls and a further one, and its expected output."""
    control = cluster.control
    probe = control.dispatcher.enter(make_call(version, request_id="probe", tokens=10_000))
    loads: list[VersionLoad] = []

    def is_reported() -> bool:
        loads[:] = [load for report in control.state_cache.load_reports() for load in report.loads]
        return any(load.arrived_calls > calls for load in loads)

    await control.changes.wait_for(is_reported)
    control.dispatcher.leave(probe)
    (load,) = loads
    assert load.arrived_calls == calls + 1, "a call arrives once"
    assert load.arrived_tokens == (calls + 1) * len(PROMPT)
    return load, probe.tokens.kv - probe.tokens.prompt


async def test_a_call_that_was_handed_off_counts_once() -> None:
    async with open_cluster(2) as cluster:
        version, _ = await disaggregated(cluster, n0=InstanceRole.PREFILL, n1=InstanceRole.DECODE)
        cluster.control.dispatcher.clock = clock = FakeClock()
        cluster.hold_tokens()
        asking = asyncio.create_task(ask(cluster.control, make_call(version, tokens=6)))
        for node, seconds in (("n0", 3.0), ("n1", 5.0)):
            await cluster.nodes[node].token.arrived()
            clock.advance(seconds)
            cluster.nodes[node].token.open()
        await asking
        assert cluster.control.stats().moved == 1
        load, output = await averages(cluster, version, 1)
        assert (load.service_s, output) == (8.0, 6)


async def test_a_call_that_failed_over_counts_once() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(Scaling(live=LiveMode.OFF))
        await cluster.control.cluster.scale("f", 2, (), wait=True)
        cluster.control.dispatcher.clock = clock = FakeClock()
        cluster.hold_tokens()
        asking = asyncio.create_task(ask(cluster.control, make_call(version, tokens=9)))
        await until(lambda: any(node.asked for node in cluster.nodes.values()))
        first, second = sorted(cluster.nodes.values(), key=lambda node: not node.asked)
        await first.token.arrived()
        clock.advance(2.0)
        first.dies_after = 1
        first.token.open()
        await second.token.arrived()
        clock.advance(4.0)
        second.token.open()
        assert len((await asking).ids) == 9 and cluster.control.stats().failovers == 1
        load, output = await averages(cluster, version, 1)
        assert (load.service_s, output) == (6.0, 9)


async def test_a_call_that_left_a_pipeline_counts_once_without_a_time() -> None:
    async with loading_cluster() as live:
        cluster, version = live.cluster, live.version
        live.hold(n0=LOW, n1=HIGH)
        await live.until_pipelines(1)
        cluster.hold_tokens()
        asking = [Asking(live, f"r{number}", 20) for number in range(2)]
        await cluster.nodes["n1"].token.arrived()
        await live.finish("n0", "n1")
        await live.until_pipelines(0)
        cluster.give_tokens()
        assert [len(await one.ends()) for one in asking] == [20, 20]
        assert cluster.control.stats().moved >= 1
        load, output = await averages(cluster, version, 2)
        assert (load.service_s, output) == (None, 20), "no instance ran the whole of it"


async def test_a_call_that_ends_in_a_pipeline_counts() -> None:
    async with loading_cluster() as live:
        live.hold(n0=LOW, n1=HIGH)
        await live.until_pipelines(1)
        assert len(await Asking(live, "r", 7).ends()) == 7
        assert live.pipelines(), "it has run there alone"
        load, output = await averages(live.cluster, live.version, 1)
        assert (load.service_s, output) == (None, 7)
