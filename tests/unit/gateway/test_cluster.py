"""What operators ask: scale, warm, drop, host copies, logs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.core.contract import DispatchError, PulledModel, WaitStage
from gateway.fakes.node import tokens_after
from registry.errors import NotFound, RemoteError
from registry.records.engine import EngineKind
from registry.records.function import Scaling
from registry.records.node import Tier
from tests.fixtures.control import MIB, ask, make_call, make_version, open_cluster, open_gateway
from tests.fixtures.patience import PATIENCE_S


async def test_scale_sets_the_number_once() -> None:
    async with open_cluster(3) as cluster:
        version = await cluster.deploy(Scaling(keep_alive_s=60.0))
        await cluster.control.cluster.scale("f", 3, (), wait=True)
        assert len(cluster.ready()) == 3
        assert cluster.counts("store_reads") == 1
        await cluster.control.cluster.scale("f", 1, (), wait=True)
        assert len(cluster.ready()) == 1
        await cluster.control.cluster.scale("f", 0, (), wait=True)
        assert cluster.control.state_cache.instances() == []
        answer = await ask(cluster.control, make_call(version))  # asleep until the next request
        assert answer.ids == tokens_after((1, 2, 3), 4)


async def test_scale_on_a_named_node_moves_the_instance_there() -> None:
    async with open_cluster(3) as cluster:
        await cluster.deploy()
        await cluster.control.cluster.scale("f", 1, ("n1",), wait=True)
        assert [i.node for i in cluster.ready()] == ["n1"]
        await cluster.control.cluster.scale("f", 1, ("n2",), wait=True)
        await cluster.until_ready(1)
        assert [i.node for i in cluster.ready()] == ["n2"]
        assert {i.start_kind.value for i in cluster.ready()} == {"cold"}
        assert cluster.counts("store_reads") == 1


async def test_scale_says_why_it_cannot() -> None:
    async with open_cluster(2) as cluster:
        await cluster.deploy(Scaling(max_instances=2))
        scale = cluster.control.cluster.scale
        with pytest.raises(NotFound):
            await scale("nobody", 1, (), wait=True)
        with pytest.raises(NotFound, match="no node 'n9'; usable nodes: n0, n1"):
            await scale("f", 1, ("n9",), wait=True)
        for instances, on, code in [
            (3, (), "bad_request"),
            (2, ("n0",), "bad_request"),
        ]:
            with pytest.raises(DispatchError) as caught:
                await scale("f", instances, on, wait=True)
            assert caught.value.code == code
        for node in cluster.nodes.values():
            node.start_error = RemoteError("start_failed", "broken handler")
        with pytest.raises(DispatchError, match="broken handler") as caught:
            await scale("f", 2, (), wait=True)
        assert caught.value.code == "start_failed"


async def test_scale_may_be_asked_of_any_gateway() -> None:
    async with open_cluster(2) as cluster, open_gateway(cluster, "g1") as other:
        version = await cluster.deploy()
        await other.changes.wait_for(lambda: other.state_cache.current("f") == version)
        await other.cluster.scale("f", 2, (), wait=True)
        assert cluster.counts("starts") == 2


async def test_warm_fills_the_host_tiers_with_one_store_read() -> None:
    async with open_cluster(3) as cluster:
        version = await cluster.deploy()
        stages = [stage async for stage in cluster.control.cluster.warm("f", None, ())]
        assert stages[-1].fraction == 1.0
        assert version.image is not None
        assert all(node.holds(version.image, Tier.HOST) for node in cluster.nodes.values())
        assert cluster.counts("store_reads") == 1
        assert [stage async for stage in cluster.control.cluster.warm("f", 2, ())] == []
        with pytest.raises(DispatchError):
            [stage async for stage in cluster.control.cluster.warm("f", 4, ())]


async def test_a_pulled_model_is_where_the_image_is_or_on_the_named_node() -> None:
    async with open_cluster(3) as cluster:
        version = await cluster.deploy()
        control = cluster.control.cluster
        holder = await cluster.first_holder(version)
        (*_, first) = [step async for step in control.pull("f", None)]
        assert first == PulledModel(
            node=holder, host=f"host-{holder}", version=1, folder=f"/models/{holder}/f-1"
        )
        assert set(cluster.nodes[holder].folders["f-1"].files) == set(version.assets)
        other = next(name for name in cluster.nodes if name != holder)
        (*_, second) = [step async for step in control.pull("f", other)]
        assert isinstance(second, PulledModel) and second.node == other
        assert cluster.counts("store_reads") == 1
        await control.drop("f", "host", (other,))
        assert not cluster.nodes[other].folders and cluster.nodes[holder].folders
        with pytest.raises(NotFound, match="no node 'mars'"):
            [step async for step in control.pull("f", "mars")]


async def test_warms_that_are_asked_for_at_once_are_one_cast() -> None:
    async with open_cluster(3) as cluster:
        version = await cluster.deploy()
        control, state_cache = cluster.control.cluster, cluster.control.state_cache
        holders = lambda: [one.id for one in state_cache.holders(version.image or "", Tier.HOST)]  # noqa: E731
        await cluster.control.changes.wait_for(lambda: bool(holders()))
        others = set(cluster.nodes) - set(holders())
        warms = [control.warm("f", None, (name,)) for name in others]

        async def run(warm: AsyncIterator[WaitStage]) -> None:
            assert [stage async for stage in warm][-1].fraction == 1.0

        await asyncio.gather(*map(run, warms))
        (cast,) = [status.record for status in await cluster.state.casts()]
        assert {member.node for member in cast.targets} == others and cast.epoch == 1


async def test_leaving_warm_early_stops_it() -> None:
    async with open_cluster(2) as cluster:
        await cluster.deploy()
        for node in cluster.nodes.values():
            node.loading.close()
        warming = cluster.control.cluster.warm("f", None, ())
        async for _ in warming:
            break
        await warming.aclose()  # type: ignore[attr-defined]
        for node in cluster.nodes.values():
            node.loading.open()


async def test_drop_takes_an_image_from_a_tier_and_one_copy_comes_back() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        assert version.image is not None
        await cluster.control.cluster.ensure_host_copy(version)
        holders = lambda: cluster.control.state_cache.holders(version.image, Tier.HOST)  # noqa: E731
        await cluster.control.changes.wait_for(lambda: len(holders()) == 1)
        await cluster.control.cluster.drop("f", "host", [holders()[0].id])
        await cluster.control.changes.wait_for(lambda: len(holders()) == 1)
        assert cluster.counts("store_reads") == 2


async def test_a_copy_that_nodes_of_a_host_share_is_dropped_once() -> None:
    async with open_cluster(3, host="one") as cluster:
        await cluster.deploy()
        await cluster.control.cluster.scale("f", 3, (), wait=True)
        for name in ("n1", "n2"):
            [step async for step in cluster.control.cluster.pull("f", name)]
        await cluster.control.cluster.drop("f", "gpu", ("n0",))
        assert cluster.nodes["n1"].folders and cluster.nodes["n2"].folders
        await cluster.control.cluster.drop("f", "host", ())
        assert not any(node.folders for node in cluster.nodes.values())
        assert cluster.counts("drops") == 2
        await cluster.control.cluster.drop("f", "gpu", ())
        assert cluster.counts("drops") == 4


async def test_a_shared_copy_is_dropped_by_whoever_is_left_of_its_host() -> None:
    async with open_cluster(3, host="one") as cluster:
        await cluster.deploy()
        await cluster.control.cluster.scale("f", 3, (), wait=True)
        for name in ("n0", "n2"):
            await cluster.nodes[name].kill()  # of which the gateway does not know yet
        await cluster.control.cluster.drop("f", "host", ())
        assert cluster.nodes["n1"].counts["drops"] == 1


async def test_ensure_host_copy_joins_what_is_under_way_and_tries_elsewhere() -> None:
    async with open_cluster(2) as cluster:
        draft = make_version(image="not-deployed-yet")
        assert draft.image is not None
        await asyncio.gather(*(cluster.control.cluster.ensure_host_copy(draft) for _ in range(3)))
        assert cluster.counts("store_reads") == 1
        assert sum(node.holds(draft.image, Tier.HOST) for node in cluster.nodes.values()) == 1
        await cluster.control.cluster.ensure_host_copy(make_version(image=None))


async def test_a_deploy_is_refused_that_no_node_has_the_gpus_for() -> None:
    args = ("--tensor-parallel-size", "2")
    version = replace(make_version(), engine=EngineKind.VLLM, engine_args=args)
    has_vllm = {"engines": tuple(EngineKind), "gpu_bytes": 64 * MIB}
    async with open_cluster(1, device="cuda:0", **has_vllm) as cluster:
        with pytest.raises(DispatchError, match="no node has exactly 2") as caught:
            await cluster.control.cluster.check_model(version)
        assert (caught.value.code, caught.value.status) == ("unsupported_model", 422)
        await cluster.add_node("pair", device="cuda:1,2", gpu_count=2, **has_vllm)
        await cluster.until(lambda: len(list(cluster.control.state_cache.usable_nodes())) == 2)
        assert await cluster.control.cluster.check_model(version), "the native engine serves first"
        large = replace(version, image_bytes=65 * MIB)
        assert not await cluster.control.cluster.check_model(large), "it has no space for that"


async def test_an_instance_that_is_divided_among_gpus_is_billed_on_the_node_that_has_them() -> None:
    args = ("--tensor-parallel-size", "2")
    has_vllm = {"engines": tuple(EngineKind)}
    async with open_cluster(1, device="cuda:0", **has_vllm) as cluster:
        await cluster.add_node("pair", device="cuda:1,2", gpu_count=2, **has_vllm)
        await cluster.until(lambda: len(list(cluster.control.state_cache.usable_nodes())) == 2)
        draft = replace(make_version(), engine=EngineKind.VLLM, engine_args=args)
        version = await cluster.state.create_version(draft, None)
        await cluster.until(lambda: cluster.control.state_cache.current("f") == version)
        assigned = (await ask(cluster.control, make_call(version))).assigned
        assert (assigned.node, assigned.gpu_count) == ("pair", 2)


async def test_a_model_is_refused_if_no_node_has_an_engine_for_it() -> None:
    async with open_cluster(2) as cluster:
        version = make_version(image="odd")
        control = cluster.control.cluster
        assert version.image is not None
        await control.check_model(version)
        for node in cluster.nodes.values():
            node.refusals[version.image] = "the checkpoint lacks lm_head.weight"
        with pytest.raises(
            DispatchError, match=r"^the checkpoint lacks lm_head\.weight; or deploy it with --engine vllm$"
        ) as caught:
            await control.check_model(version)
        assert (caught.value.code, caught.value.status) == ("unsupported_model", 422)
        await control.check_model(make_version(image=None))


async def test_logs_are_merged_and_prefixed() -> None:
    async with open_cluster(2) as cluster:
        await cluster.deploy()
        lines = [line async for line in cluster.control.cluster.logs("f", 1, 10, False)]
        assert sorted(lines) == ["n0 | a line of f", "n1 | a line of f"]


async def test_logs_name_the_nodes_that_were_killed() -> None:
    async with open_cluster(2) as cluster:
        await cluster.deploy()
        await cluster.control.cluster.scale("f", 2, (), wait=True)
        await cluster.nodes["n1"].leave()  # as when the lease of a killed node ends
        logs, lines = cluster.control.cluster.logs, list[str]()
        async with asyncio.timeout(PATIENCE_S):
            while not any("is gone" in line for line in lines):
                lines = [line async for line in logs("f", 1, 10, False)]
        assert lines[0].startswith("n1 | (this node is gone, ") and lines[1:] == ["n0 | a line of f"]
        assert not [line async for line in logs("g", 1, 10, False) if "n1" in line]


async def test_followed_logs_go_on_with_nodes_that_come() -> None:
    async with open_cluster(1) as cluster, asyncio.timeout(PATIENCE_S):
        await cluster.deploy()
        following = cluster.control.cluster.logs("f", 1, 10, True)
        assert await anext(following) == "n0 | a line of f"
        coming = asyncio.ensure_future(anext(following))
        await cluster.add_node("n1")
        assert await coming == "n1 | a line of f"
        await following.aclose()  # type: ignore[attr-defined]


async def test_a_cordoned_node_starts_nothing_until_it_is_uncordoned() -> None:
    async with open_cluster(2) as cluster:
        await cluster.deploy()
        control = cluster.control.cluster
        await control.cordon("n0", cordoned=True)
        await control.scale("f", 1, (), wait=True)
        assert [i.node for i in cluster.ready()] == ["n1"]
        with pytest.raises(DispatchError, match="n0 is cordoned"):
            await control.scale("f", 1, ("n0",), wait=True)
        await control.cordon("n0", cordoned=False)
        await control.scale("f", 2, (), wait=True)
        assert {i.node for i in cluster.ready()} == {"n0", "n1"}
        with pytest.raises(NotFound, match="no node 'n9'"):
            await control.cordon("n9", cordoned=True)


async def test_a_drained_node_has_its_instances_started_elsewhere_first() -> None:
    async with open_cluster(3) as cluster:
        await cluster.deploy()
        control = cluster.control.cluster
        await control.scale("f", 2, ("n0", "n1"), wait=True)
        assert not await control.drain("n0", wait=True)
        await cluster.until_ready(2)
        assert {i.node for i in cluster.ready()} == {"n1", "n2"}
        assert not await control.drain("n1", wait=True), "one node is left, and one instance"
        assert {i.node for i in cluster.ready()} == {"n2"}
        with pytest.raises(DispatchError, match="no other node") as caught:
            await control.drain("n2", wait=True)
        assert (caught.value.code, caught.value.status) == ("no_nodes", 503)
        assert {i.node for i in cluster.ready()} == {"n2"}, "what has no other place stays"


async def test_the_view_is_the_state_as_known_here() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        view = cluster.control.cluster.view()
        assert view.versions == (version,)
        assert [up.record.id for up in view.nodes] == ["n0", "n1"]
