"""Calls of disaggregated functions: from prefill instances to decode instances, whatever happens to these."""

import asyncio
import random
from dataclasses import replace

import pytest

from gateway.cluster.state_cache import VersionKey
from gateway.fakes.node import tokens_after
from gateway.planning.load_target import PolicyBySetting
from gateway.planning.planner import ScalingPlanner
from gateway.schemas.admin import ScalingPatch
from registry.errors import InvalidRecord, RemoteError
from registry.messages.node import Generate, Tokens
from registry.records.change import FunctionChanged, InstanceChanged
from registry.records.engine import EngineKind
from registry.records.function import (
    Scaling,
    ScalingMode,
    ServingMode,
    check_applies,
    check_serving,
)
from registry.records.live import InstanceRole, LiveMode
from tests.fixtures.control import FakeCluster, ask, make_call, open_cluster
from tests.fixtures.loading import loading_cluster
from tests.fixtures.patience import PATIENCE_S, until
from tests.fixtures.roles import disaggregated

PREFILL, DECODE = InstanceRole.PREFILL, InstanceRole.DECODE


def asked(cluster: FakeCluster, node: str) -> list[Generate]:
    return cluster.nodes[node].asked


async def test_a_call_moves_with_its_kv_cache_after_its_first_token() -> None:
    async with open_cluster(2) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE)
        answer = await ask(cluster.control, make_call(version, tokens=6))
        assert answer.ids == tokens_after((1, 2, 3), 6)
        assert answer.usage.completion_tokens == 6 and answer.usage.prompt_tokens == 3
        (prefill,), (decode,) = asked(cluster, "n0"), asked(cluster, "n1")
        assert prefill.hand_off and prefill.kv is None
        assert not decode.hand_off and decode.kv is not None and len(decode.generated_ids) == 1
        assert decode.kv.sequence == prefill.request_id
        (prefetch,) = cluster.nodes["n1"].prefetched
        assert prefetch.kv == decode.kv and prefetch.tokens == 3
        assert prefetch.instance_id == decode.instance_id
        stats = cluster.control.stats()
        assert (stats.moved, stats.failovers, stats.held, stats.in_flight) == (1, 0, 0, 0)


async def test_a_call_of_one_token_ends_where_its_prompt_ran() -> None:
    async with open_cluster(2) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE)
        answer = await ask(cluster.control, make_call(version, tokens=1))
        assert answer.ids == tokens_after((1, 2, 3), 1) and not asked(cluster, "n1")


async def test_without_a_decode_instance_a_call_stays() -> None:
    async with open_cluster(2) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=PREFILL)
        answer = await ask(cluster.control, make_call(version, tokens=6))
        assert answer.ids == tokens_after((1, 2, 3), 6)
        assert cluster.control.stats().moved == 0


async def test_a_full_decode_instance_holds_up_no_prompt() -> None:
    async with open_cluster(2) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE)
        cluster.nodes["n1"].token.close()
        calls = [make_call(version, request_id=f"r{i}", prompt=(i,)) for i in range(40)]
        tasks = [asyncio.create_task(ask(cluster.control, call)) for call in calls]
        await cluster.control.changes.wait_for(lambda: len(asked(cluster, "n0")) == 40)
        assert 0 < len(asked(cluster, "n1")) < 40
        cluster.nodes["n1"].token.open()
        answers = await asyncio.gather(*tasks)
        assert [answer.ids for answer in answers] == [tokens_after((i,), 4) for i in range(40)]


async def test_a_call_whose_decode_instance_dies_runs_its_prompt_again() -> None:
    async with open_cluster(3) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE, n2=DECODE)
        for node in ("n1", "n2"):
            cluster.nodes[node].dies_after = None
        victim = cluster.nodes["n1"]
        victim.dies_after = 2
        answers = await asyncio.gather(
            *(
                ask(cluster.control, make_call(version, request_id=f"r{i}", prompt=(i,), tokens=9))
                for i in range(6)
            )
        )
        assert [answer.ids for answer in answers] == [tokens_after((i,), 9) for i in range(6)]
        assert not victim.alive and cluster.control.stats().failovers > 0
        assert cluster.control.stats().in_flight == 0


async def test_a_call_that_a_decode_instance_rejects_keeps_its_kv_cache() -> None:
    async with open_cluster(3) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE, n2=DECODE)
        for node in ("n1", "n2"):
            cluster.nodes[node].prefetches = False
            cluster.nodes[node].call_errors.append(RemoteError("overloaded", "no"))
        answer = await ask(cluster.control, make_call(version, tokens=6))
        assert answer.ids == tokens_after((1, 2, 3), 6)
        (prefill,) = asked(cluster, "n0")
        (decode,) = (*asked(cluster, "n1"), *asked(cluster, "n2"))
        assert decode.kv is not None and decode.kv.sequence == prefill.request_id
        assert cluster.control.stats().in_flight == 0


async def test_a_call_goes_where_its_kv_cache_is_fetched_while_its_prompt_runs() -> None:
    async with open_cluster(3) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE, n2=DECODE)
        cluster.nodes["n0"].token.close()
        decoding = [cluster.nodes["n1"], cluster.nodes["n2"]]
        calls = [make_call(version, request_id=f"r{i}", prompt=(i,)) for i in range(4)]
        tasks = [asyncio.create_task(ask(cluster.control, call)) for call in calls]
        await until(lambda: sum(len(node.prefetched) for node in decoding) == 4)
        assert [len(node.prefetched) for node in decoding] == [2, 2], "each has a slot reserved"
        cluster.nodes["n0"].token.open()
        answers = await asyncio.gather(*tasks)
        assert [answer.ids for answer in answers] == [tokens_after((i,), 4) for i in range(4)]
        for node in decoding:
            assert [one.kv for one in node.prefetched] == [work.kv for work in node.asked]
        assert repr(cluster.control.dispatcher.slots) == "<Slots {}>"


async def test_nothing_is_prefetched_once_the_call_is_there() -> None:
    """K and V can be fetched once: the call would wait for what its own prefetch has."""
    async with open_cluster(2) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE)
        cluster.nodes["n0"].token.yields = False  # all replies come together
        answer = await ask(cluster.control, make_call(version, tokens=6))
        assert answer.ids == tokens_after((1, 2, 3), 6)
        (decode,) = asked(cluster, "n1")
        assert decode.kv is not None and not cluster.nodes["n1"].prefetched


async def test_a_call_that_is_left_gives_its_reserved_slot_back() -> None:
    async with open_cluster(2) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE)
        cluster.nodes["n0"].token.close()
        task = asyncio.create_task(ask(cluster.control, make_call(version)))
        await until(lambda: bool(cluster.nodes["n1"].prefetched))
        task.cancel()
        await asyncio.wait([task])
        assert repr(cluster.control.dispatcher.slots) == "<Slots {}>"
        cluster.nodes["n0"].token.open()


async def test_a_call_whose_reserved_instance_dies_goes_to_another() -> None:
    async with open_cluster(3) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE, n2=DECODE)
        cluster.nodes["n0"].token.close()
        task = asyncio.create_task(ask(cluster.control, make_call(version, tokens=6)))
        decoding = [cluster.nodes["n1"], cluster.nodes["n2"]]
        await until(lambda: any(node.prefetched for node in decoding))
        (reserved,) = (node for node in decoding if node.prefetched)
        await reserved.kill()
        ready = cluster.control.state_cache.ready
        await cluster.control.changes.wait_for(
            lambda: reserved.id not in {one.node for one in ready(VersionKey("f", 1))}
        )
        cluster.nodes["n0"].token.open()
        assert (await task).ids == tokens_after((1, 2, 3), 6)
        assert repr(cluster.control.dispatcher.slots) == "<Slots {}>"


async def test_a_call_that_a_decode_instance_may_have_fetched_runs_its_prompt_again() -> None:
    async with open_cluster(3) as cluster:
        version, _ = await disaggregated(cluster, n0=PREFILL, n1=DECODE, n2=DECODE)
        for node in ("n1", "n2"):
            cluster.nodes[node].call_errors.append(RemoteError("draining", "it ends"))
        answer = await ask(cluster.control, make_call(version, tokens=6))
        assert answer.ids == tokens_after((1, 2, 3), 6)
        assert [work.kv for work in asked(cluster, "n0")] == [None] * len(asked(cluster, "n0"))
        assert len(asked(cluster, "n0")) > 1
        assert cluster.control.stats().in_flight == 0


async def test_a_decode_instance_gets_no_more_calls_than_its_kv_cache_holds() -> None:
    async with open_cluster(2) as cluster:
        version, _ = await disaggregated(cluster, policy=ScalingMode.LOAD, n0=PREFILL, n1=DECODE)
        instance = next(one for one in cluster.control.state_cache.instances() if one.node == "n1")
        small = InstanceChanged(record=replace(instance, kv_tokens=100))
        cluster.control.state_cache.apply(small, cluster.control.dispatcher.clock.monotonic_s())
        cluster.nodes["n1"].token.close()
        prompt = tuple(range(40))
        calls = [make_call(version, request_id=f"r{i}", prompt=prompt, tokens=4) for i in range(6)]
        tasks = [asyncio.create_task(ask(cluster.control, call)) for call in calls]
        stats, running = cluster.control.stats, cluster.nodes["n1"]
        await cluster.control.changes.wait_for(lambda: stats().moved == 6)
        await until(lambda: len(running.asked) == 2)
        assert stats().held == 4
        cluster.nodes["n1"].token.open()
        answers = await asyncio.gather(*tasks)
        assert [answer.ids for answer in answers] == [tokens_after(prompt, 4)] * 6
        assert repr(cluster.control.dispatcher.slots) == "<Slots {}>"


async def test_only_the_nodes_own_engine_hands_calls_off() -> None:
    scaling = Scaling(policy=ScalingMode.LOAD, serving=ServingMode.DISAGGREGATED, live=LiveMode.OFF)
    async with open_cluster(2) as cluster:
        version = replace(await cluster.deploy(scaling), engine=EngineKind.VLLM)
        state_cache = cluster.control.state_cache
        state_cache.apply(FunctionChanged(function=state_cache.functions["f"], version=version), 0.0)
        plan = ScalingPlanner(PolicyBySetting(), str).plan(state_cache, {}, {}, 0.0)
        assert plan.roles == {VersionKey("f", 1): {}}
    with pytest.raises(InvalidRecord, match="for the engine native, not vllm"):
        check_serving(ServingMode.DISAGGREGATED, EngineKind.VLLM)
    check_serving(ServingMode.COLOCATED, EngineKind.VLLM)


async def test_a_pair_runs_prompts_and_hands_its_calls_off() -> None:
    disaggregated = {"serving": ServingMode.DISAGGREGATED, "policy": ScalingMode.LOAD}
    async with (
        asyncio.timeout(PATIENCE_S),
        loading_cluster(3, live=LiveMode.ZIGZAG, **disaggregated) as live,
    ):
        await live.finish("n0", "n1")
        control, roles = live.control, live.control.state_cache.live.roles
        await control.changes.wait_for(lambda: len(roles("f", 1)) == 2)
        live.hold(n2=0b11)
        (pair,) = await live.until_pipelines(1)
        assert pair.source is not None and roles("f", 1)[pair.source.instance_id] is PREFILL
        (decoding,) = {"n0", "n1"} - {pair.source.node}
        source, ids = live.cluster.nodes[pair.source.node], list[int]()
        async with control.dispatcher.run(make_call(live.version, tokens=50)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    ids += event.ids
                    source.token.close()
        assert ids == tokens_after((1, 2, 3), 50)
        assert len(source.pipelines.left) == 1
        (continued,) = asked(live.cluster, decoding)
        assert continued.kv is not None and continued.kv.pipeline == pair.pipeline_id
        assert live.pipelines() == (pair,), "it serves further prompts"
        assert repr(control.dispatcher.slots) == "<Slots {}>"
        source.token.open()


async def test_no_token_is_lost_or_repeated_through_50_changes_of_roles() -> None:
    async with open_cluster(4) as cluster:
        version, roles = await disaggregated(cluster, n0=PREFILL, n1=DECODE, n2=DECODE, n3=DECODE)
        rng, over, answered = random.Random(5), asyncio.Event(), asyncio.Event()

        async def change() -> None:
            for _ in range(50):
                await roles.publish({node: rng.choice([PREFILL, DECODE]) for node in cluster.nodes})
                answered.clear()
                await answered.wait()
            over.set()

        async def call(number: int) -> int:
            done = 0
            while not over.is_set():
                prompt = (number, done)
                request = make_call(version, request_id=f"r{number}-{done}", prompt=prompt, tokens=20)
                assert (await ask(cluster.control, request)).ids == tokens_after(prompt, 20)
                answered.set()
                done += 1
            return done

        *done, _ = await asyncio.gather(*(call(number) for number in range(8)), change())
        assert sum(done) >= 50 and cluster.control.stats().moved > 0
        assert cluster.control.stats().held == cluster.control.stats().in_flight == 0


async def test_the_controller_gives_roles_to_ready_instances() -> None:
    scaling = Scaling(policy=ScalingMode.LOAD, serving=ServingMode.DISAGGREGATED, live=LiveMode.OFF)
    async with open_cluster(3) as cluster:
        version = await cluster.deploy(scaling)
        control = cluster.control
        answer = await ask(control, make_call(version))
        assert answer.ids == tokens_after((1, 2, 3), 4)
        assert control.state_cache.live.roles("f", 1) == {}, "a single instance does both"
        await control.cluster.scale("f", 3, (), wait=True)
        await control.changes.wait_for(lambda: len(control.state_cache.live.roles("f", 1)) == 3)
        roles = control.state_cache.live.roles("f", 1)
        assert set(roles.values()) == {PREFILL, DECODE}
        answer = await ask(control, make_call(version, request_id="s", tokens=9))
        assert answer.ids == tokens_after((1, 2, 3), 9) and control.stats().moved == 1
        kept = control.state_cache.live.roles("f", 1)
        assert kept == roles, "nothing changes without need"


@pytest.mark.parametrize("serving", ["disaggregated", ServingMode.DISAGGREGATED])
def test_disaggregated_serving_needs_the_load_policy(serving: str) -> None:
    with pytest.raises(InvalidRecord, match="--scaling load"):
        check_applies({"serving": serving}, ScalingMode.CONCURRENCY)
    check_applies({"serving": serving}, ScalingMode.LOAD)
    by_load = Scaling(policy=ScalingMode.LOAD, serving=ServingMode.DISAGGREGATED)
    with pytest.raises(InvalidRecord, match="--serving colocated"):
        ScalingPatch(policy=ScalingMode.CONCURRENCY).applied(by_load)
    changed = ScalingPatch(policy=ScalingMode.CONCURRENCY, serving=ServingMode.COLOCATED).applied(by_load)
    assert changed == Scaling()
