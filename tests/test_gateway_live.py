"""Serving while a model loads, as gateways do it: over fake nodes, which count what each call used."""

import asyncio

from control_fixture import LAYERS, make_call
from loading_fixture import HIGH, LOW, PROMPT, Asking, LiveCluster, loading_cluster

from gateway.fake_node import OUTPUT_US, FakeNode, tokens_after
from gateway.fake_pipelines import kv_at
from gateway.metrics import Metrics
from gateway.serving import Serving
from registry.live import Live
from registry.messages import Tokens


async def asked_midway(
    cluster: LiveCluster, calls: int, tokens: int, gateway: int = 0
) -> tuple[list[Asking], FakeNode]:
    """Calls by the pipeline of n0 and n1, which have some tokens and wait at its head for the next ones."""
    cluster.hold(n0=LOW, n1=HIGH)
    await cluster.until_pipelines(1, gateway)
    head = cluster.cluster.nodes["n1"]
    asked = [Asking(cluster, f"r{number}", tokens, gateway) for number in range(calls)]
    await asyncio.gather(*(one.begun() for one in asked))
    head.token.close()
    await head.token.arrived()
    return asked, head


def test_calls_are_served_while_the_model_loads() -> None:
    async def main() -> None:
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
            cluster.control.settlement.note(asked.run.used)
            for node in cluster.cluster.nodes.values():
                await node.settles()
                assert node.settled == [("r",)]
            metrics = Metrics(cluster.control.cluster.view).render().decode()
            assert 'hypercast_live_pipelines{function="f",version="1"} 1.0' in metrics

    asyncio.run(main())


def test_members_that_are_whole_take_their_share_and_then_all() -> None:
    async def main() -> None:
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
                assert len(one.assigned) == 1  # nobody noticed
            assert cluster.control.stats().failovers == 0
            # Where a call goes on is told where its K and V lie; one that begins is not.
            works = {work.request_id: work for node in cluster.cluster.nodes.values() for work in node.asked}
            for name, work in works.items():
                begun = works.get(name.partition("+")[0]) if "+" in name else None
                stages = head.pipelines.opened[0].stages
                assert work.kv == (None if begun is None else kv_at(stages, begun))

    asyncio.run(main())


def test_a_call_that_moved_has_not_begun_where_it_is_before_its_next_token() -> None:
    async def main() -> None:
        async with loading_cluster(3) as cluster:
            cluster.hold(n0=LOW, n1=HIGH)
            await cluster.until_pipelines(1)
            head = cluster.cluster.nodes["n1"]
            call = make_call(cluster.version, prompt=PROMPT, tokens=30)
            async with cluster.control.dispatcher.run(call) as serving:
                assert isinstance(serving, Serving)
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
                assert serving.unfinished.begun
                await cluster.cluster.nodes["n0"].kill()
                await cluster.until_pipelines(0)
                head.token.close()
                cluster.hold(n2=LOW)
                await cluster.until_pipelines(1)
                await head.token.arrived()
                assert serving.unfinished.tokens == len(PROMPT) + len(ids) > len(PROMPT)
                assert not serving.unfinished.begun
                head.token.open()
                await reading
                assert ids == tokens_after(PROMPT, 30)

    asyncio.run(main())


def test_a_lost_stage_costs_no_token() -> None:
    async def main() -> None:
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
                assert not exact and lost_us == 0  # what it used is its own to tell
                assert sum(us for (_, node), (us, _) in used.items() if node == "n1") == 30 * OUTPUT_US
            assert cluster.control.stats().failovers == 3

    asyncio.run(main())


def test_a_lost_head_costs_no_token() -> None:
    async def main() -> None:
        async with loading_cluster() as cluster:
            (asked,), head = await asked_midway(cluster, 1, 30)
            await head.kill()
            await cluster.until_pipelines(0)
            cluster.cluster.nodes["n0"].loading.open()
            assert await asked.ends() == tokens_after(PROMPT, 30)
            assert len(asked.assigned) == 1

    asyncio.run(main())


def test_every_gateway_uses_a_pipeline() -> None:
    async def main() -> None:
        async with loading_cluster(gateways=2) as cluster:
            cluster.hold(n0=LOW, n1=HIGH)
            for gateway in range(2):
                await cluster.until_pipelines(1, gateway)
            asked = [Asking(cluster, f"r{gateway}", 12, gateway) for gateway in range(2)]
            assert [await one.ends() for one in asked] == [tokens_after(PROMPT, 12)] * 2
            assert [one.assigned[0].start_kind for one in asked] == ["live", "live"]

    asyncio.run(main())


def test_calls_of_other_gateways_move_too() -> None:
    async def main() -> None:
        async with loading_cluster(gateways=2) as cluster:
            asked, head = await asked_midway(cluster, 2, 40, gateway=1)
            await cluster.finish("n0")
            other = cluster.cluster.gateways[1]
            await other.changes.wait_for(lambda: other.stats().moved == 1)
            await cluster.finish("n1")
            await cluster.until_pipelines(0, 1)
            head.token.open()
            assert [await one.ends() for one in asked] == [tokens_after(PROMPT, 40)] * 2

    asyncio.run(main())


def test_who_does_not_want_it_is_not_served_live() -> None:
    async def main() -> None:
        for live, words in ((Live.OFF, "live is off"), (Live.AUTO, "auto: waiting takes ")):
            async with loading_cluster(live=live) as cluster:
                cluster.hold(n0=LOW, n1=HIGH)
                record = cluster.record()
                assert record is not None and record.way is Live.OFF
                assert record.reason.startswith(words)
                asked = Asking(cluster, "r", 5)
                await cluster.finish("n0", "n1")
                assert await asked.ends() == tokens_after(PROMPT, 5)
                assert asked.assigned[0].start_kind == "cold"
                assert cluster.cluster.nodes["n1"].pipelines.opened == []

    asyncio.run(main())


def test_a_single_node_forms_no_pipeline() -> None:
    async def main() -> None:
        async with loading_cluster(2, instances=1) as cluster:
            record = cluster.record()
            assert record is not None and record.way is Live.PIPELINE  # others may follow
            cluster.hold(n0=LOW)
            assert record.pipelines == () and LAYERS == 6

    asyncio.run(main())
