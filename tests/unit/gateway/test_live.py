"""Serving while a model loads, as gateways do it: over fake nodes, which count what each call used."""

import asyncio

from gateway.dispatch.execution import RequestExecution
from gateway.fakes.node import OUTPUT_US, FakeNode, tokens_after
from gateway.fakes.pipelines import kv_at
from gateway.http.metrics import Metrics
from registry.messages.node import Tokens
from registry.records.live import LiveMode
from tests.fixtures.control import LAYERS, make_call
from tests.fixtures.loading import HIGH, LOW, PROMPT, Asking, LiveCluster, loading_cluster


async def asked_midway(
    cluster: LiveCluster, calls: int, tokens: int, gateway: int = 0
) -> tuple[list[Asking], FakeNode]:
    """Return calls on the pipeline of n0 and n1 that have some tokens and wait for more."""
    cluster.hold(n0=LOW, n1=HIGH)
    await cluster.until_pipelines(1, gateway)
    head = cluster.cluster.nodes["n1"]
    asked = [Asking(cluster, f"r{number}", tokens, gateway) for number in range(calls)]
    await asyncio.gather(*(one.started() for one in asked))
    head.token.close()
    await head.token.arrived()
    return asked, head


async def test_calls_are_served_while_the_model_loads() -> None:
    async with loading_cluster() as cluster:
        asked = Asking(cluster, "r", 20)
        cluster.hold(n0=LOW)
        assert cluster.pipelines() == ()
        cluster.hold(n1=HIGH)
        (pipeline,) = await cluster.until_pipelines(1)
        assert [(one.node, one.first, one.last) for one in pipeline.stages] == [
            ("n0", 0, 3),
            ("n1", 3, 6),
        ]
        assert pipeline.stages[pipeline.head].node == "n1" and pipeline.slots >= 8
        assert await asked.ends() == tokens_after(PROMPT, 20)
        assert [(one.start_kind, one.node) for one in asked.assigned] == [("live", "n1")]
        assert asked.used() == {("r", "n0"): (20 * OUTPUT_US, True), ("r", "n1"): (20 * OUTPUT_US, True)}
        assert {use.gpu.instance_id for use in asked.run.used} == {s.instance_id for s in pipeline.stages}
        cluster.control.settlement.add(asked.run.used)
        for node in cluster.cluster.nodes.values():
            await node.settles()
            assert node.settled == [("r",)]
        metrics = Metrics(cluster.control.cluster.view).render().decode()
        assert 'hypercast_live_pipelines{function="f",version="1"} 1.0' in metrics


async def test_members_that_are_whole_take_their_share_and_then_all() -> None:
    async with loading_cluster() as cluster:
        asked, head = await asked_midway(cluster, 4, 50)
        await cluster.finish("n0")
        await cluster.control.changes.wait_for(lambda: cluster.control.stats().moved == 2)
        (left,) = head.pipelines.left
        assert len(left.request_ids) == 2 and cluster.pipelines()[0].switched[0].sharers == 2
        head.token.open()
        await cluster.finish("n1")
        await cluster.until_pipelines(0)
        assert [await one.ends() for one in asked] == [tokens_after(PROMPT, 50)] * 4
        for one in asked:
            used = one.used()
            assert all(exact for _, exact in used.values())
            members = [us for (call, _), (us, _) in used.items() if "+" not in call]
            alone = [us for (call, _), (us, _) in used.items() if "+" in call]
            assert len(members) == 2 and members[0] == members[1]
            assert members[0] + sum(alone) == 51 * OUTPUT_US  # a step was on its way when it left
            assert len(one.assigned) == 1  # the client noticed nothing
        assert cluster.control.stats().failovers == 0
        # A continued call carries the location of its KV cache, a new one does not.
        works = {work.request_id: work for node in cluster.cluster.nodes.values() for work in node.asked}
        for name, work in works.items():
            first = works.get(name.partition("+")[0]) if "+" in name else None
            stages = head.pipelines.opened[0].stages
            assert work.kv == (None if first is None else kv_at(stages, first))


async def test_a_call_that_moved_has_not_begun_where_it_is_before_its_next_token() -> None:
    async with loading_cluster(3) as cluster:
        cluster.hold(n0=LOW, n1=HIGH)
        await cluster.until_pipelines(1)
        head = cluster.cluster.nodes["n1"]
        call = make_call(cluster.version, prompt=PROMPT, tokens=30)
        async with cluster.control.dispatcher.run(call) as serving:
            assert isinstance(serving, RequestExecution)
            ids: list[int] = []
            some = asyncio.Event()

            async def read() -> None:
                async for event in serving:
                    if isinstance(event, Tokens):
                        ids.extend(event.ids)
                        some.set()

            reading = asyncio.create_task(read())
            await some.wait()
            head.token.close()
            await head.token.arrived()
            assert serving.unfinished.has_token
            await cluster.cluster.nodes["n0"].kill()
            await cluster.until_pipelines(0)
            head.token.close()
            cluster.hold(n2=LOW)
            await cluster.until_pipelines(1)
            await head.token.arrived()
            assert serving.unfinished.tokens == len(PROMPT) + len(ids) > len(PROMPT)
            assert not serving.unfinished.has_token
            head.token.open()
            await reading
            assert ids == tokens_after(PROMPT, 30)


async def test_a_lost_stage_costs_no_token() -> None:
    async with loading_cluster(3) as cluster:
        asked, head = await asked_midway(cluster, 3, 30)
        await cluster.cluster.nodes["n0"].kill()
        await cluster.until_pipelines(0)
        cluster.hold(n2=LOW)
        head.token.open()
        (pipeline,) = await cluster.until_pipelines(1)
        assert {stage.node for stage in pipeline.stages} == {"n1", "n2"}
        assert [await one.ends() for one in asked] == [tokens_after(PROMPT, 30)] * 3
        for one in asked:
            used = one.used()
            lost_us, exact = used[one.run.call.work.request_id, "n0"]
            assert not exact and lost_us == 0  # its node reports its usage itself
            assert sum(us for (_, node), (us, _) in used.items() if node == "n1") == 30 * OUTPUT_US
        assert cluster.control.stats().failovers == 3


async def test_a_lost_head_costs_no_token() -> None:
    async with loading_cluster() as cluster:
        (asked,), head = await asked_midway(cluster, 1, 30)
        await head.kill()
        await cluster.until_pipelines(0)
        cluster.cluster.nodes["n0"].loading.open()
        assert await asked.ends() == tokens_after(PROMPT, 30)
        assert len(asked.assigned) == 1


async def test_every_gateway_uses_a_pipeline() -> None:
    async with loading_cluster(gateways=2) as cluster:
        cluster.hold(n0=LOW, n1=HIGH)
        for gateway in range(2):
            await cluster.until_pipelines(1, gateway)
        asked = [Asking(cluster, f"r{gateway}", 12, gateway) for gateway in range(2)]
        assert [await one.ends() for one in asked] == [tokens_after(PROMPT, 12)] * 2
        assert [one.assigned[0].start_kind for one in asked] == ["live", "live"]


async def test_calls_of_other_gateways_move_too() -> None:
    async with loading_cluster(gateways=2) as cluster:
        asked, head = await asked_midway(cluster, 2, 40, gateway=1)
        await cluster.finish("n0")
        other = cluster.cluster.gateways[1]
        await other.changes.wait_for(lambda: other.stats().moved == 1)
        await cluster.finish("n1")
        await cluster.until_pipelines(0, 1)
        head.token.open()
        assert [await one.ends() for one in asked] == [tokens_after(PROMPT, 40)] * 2


async def test_a_function_is_not_served_live_without_need() -> None:
    for live, words in ((LiveMode.OFF, "live is off"), (LiveMode.AUTO, "auto: a call waits ")):
        async with loading_cluster(live=live) as cluster:
            cluster.hold(n0=LOW, n1=HIGH)
            record = cluster.record()
            assert record is not None and record.way is LiveMode.OFF
            assert record.reason.startswith(words)
            asked = Asking(cluster, "r", 5)
            await cluster.finish("n0", "n1")
            assert await asked.ends() == tokens_after(PROMPT, 5)
            assert asked.assigned[0].start_kind == "cold"
            assert cluster.cluster.nodes["n1"].pipelines.opened == []


async def test_calls_that_queue_up_are_served_live_by_loads_that_began_before() -> None:
    async with loading_cluster(4, live=LiveMode.AUTO, ttft_target_s=0.0) as cluster:
        nodes = cluster.cluster.nodes
        await cluster.finish("n0", "n1")
        cluster.hold(n2=LOW, n3=HIGH)
        ready = cluster.cluster.ready()
        for one in ready:
            nodes[one.node].token.close()
        asked = [Asking(cluster, f"r{number}", 5) for number in range(sum(i.max_concurrency for i in ready))]
        for one in asked:
            await one.placed()
        record = cluster.record()
        assert record is not None and record.way is LiveMode.OFF and cluster.pipelines() == ()
        asked.append(Asking(cluster, "queued", 5))
        (pipeline,) = await cluster.until_pipelines(1)
        assert [stage.node for stage in pipeline.stages] == ["n2", "n3"]
        await asked[-1].ends()
        assert asked[-1].assigned[0].start_kind == "live"
        # Without a queue it stays live until the loads end.
        for one in ready:
            nodes[one.node].token.open()
        assert [await one.ends() for one in asked] == [tokens_after(PROMPT, 5)] * len(asked)
        record = cluster.record()
        assert record is not None and record.way is LiveMode.PIPELINE and "queued calls wait" in record.reason
        assert cluster.pipelines() == (pipeline,)
        await cluster.finish("n2", "n3")
        await cluster.until_pipelines(0)


async def test_a_function_whose_live_is_off_never_serves_live() -> None:
    async with loading_cluster(4, live=LiveMode.OFF, ttft_target_s=0.0) as cluster:
        await cluster.finish("n0", "n1")
        cluster.hold(n2=LOW, n3=HIGH)
        asked = [Asking(cluster, f"r{number}", 5) for number in range(40)]
        assert [await one.ends() for one in asked] == [tokens_after(PROMPT, 5)] * len(asked)
        assert {one.assigned[0].start_kind for one in asked} == {"hot"} and cluster.pipelines() == ()


async def test_a_single_node_forms_no_pipeline() -> None:
    async with loading_cluster(2, instances=1) as cluster:
        record = cluster.record()
        assert record is not None and record.way is LiveMode.PIPELINE  # others may follow
        cluster.hold(n0=LOW)
        assert record.pipelines == () and LAYERS == 6
