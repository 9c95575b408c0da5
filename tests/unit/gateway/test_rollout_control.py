"""The controller and rollouts, over fake nodes: a candidate gets an instance, and bad ones are given up."""

import asyncio
from dataclasses import replace

import pytest

from gateway.core.contract import DispatchError
from registry.errors import RemoteError
from registry.records.function import FunctionVersion, Scaling
from registry.records.rollout import Rollout, RolloutPlan, RolloutState
from registry.records.rollout_changes import begin_rollout
from tests.fixtures.control import FakeCluster, ask, make_call, make_version, open_cluster
from tests.fixtures.patience import PATIENCE_S


async def begin(cluster: FakeCluster, **changes: object) -> FunctionVersion:
    """Begin the rollout of a further version."""
    await cluster.deploy(Scaling(min_instances=1))
    await cluster.until_ready(1)
    second = await cluster.state.create_version(make_version(image="g"), None, becomes_current=False)
    plan = replace(RolloutPlan(candidate=second.version, percent=10), **changes)
    await cluster.state.change_rollout("f", lambda head: begin_rollout(head, plan, id_="r", at=1.0))
    return second


def rollout(cluster: FakeCluster) -> Rollout | None:
    return cluster.control.state_cache.functions["f"].rollout


async def until_state(cluster: FakeCluster, state: RolloutState) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await cluster.until(lambda: (known := rollout(cluster)) is not None and known.state is state)


async def operations(cluster: FakeCluster) -> list[str]:
    return [record.entry.operation for record in (await cluster.state.audit_page()).records]


async def test_a_candidate_whose_calls_fail_is_rolled_back_whichever_gateway_they_came_to() -> None:
    async with open_cluster(2, gateways=2) as cluster:
        second = await begin(cluster)
        await until_state(cluster, RolloutState.RUNNING)
        number = 0
        while (known := rollout(cluster)) is not None and known.is_active:
            for node in cluster.nodes.values():
                node.call_errors = [RemoteError("handler_error", "bad")]
            call = make_call(second, request_id=f"r{number}")
            with pytest.raises(DispatchError, match="bad"):
                await ask(cluster.gateways[number % 2], call)
            number += 1
            assert number < 10_000
        for node in cluster.nodes.values():
            node.call_errors.clear()
        await until_state(cluster, RolloutState.ROLLED_BACK)
        assert known is not None and "requests failed" in known.reason
        head = await cluster.state.function("f")
        assert (head.current, head.candidate) == (1, None)
        await cluster.until(lambda: {one.version for one in cluster.ready()} == {1})
        assert await operations(cluster) == ["rollout.rollback"]
        assert len((await ask(cluster.control, make_call(await cluster.state.version("f")))).ids) == 4


async def test_a_candidate_that_does_not_start_is_rolled_back() -> None:
    async with open_cluster(2) as cluster:
        await cluster.deploy(Scaling(min_instances=1))
        await cluster.until_ready(1)
        for node in cluster.nodes.values():
            node.start_error = RemoteError("start_failed", "no such module")
        second = await cluster.state.create_version(make_version(image="g"), None, becomes_current=False)
        plan = RolloutPlan(candidate=second.version, percent=0)
        await cluster.state.change_rollout("f", lambda head: begin_rollout(head, plan, id_="r", at=1.0))
        async with asyncio.timeout(PATIENCE_S):
            await cluster.control.cluster.rollout_started("f", "r")
        known = rollout(cluster)
        assert known is not None and known.state is RolloutState.ROLLED_BACK
        assert "no such module" in known.reason
        assert {one.version for one in cluster.ready()} == {1}


async def test_a_good_candidate_is_promoted_after_its_steps() -> None:
    async with open_cluster(2) as cluster:
        second = await begin(cluster, steps=(10.0, 100.0), step_s=1.0)
        await until_state(cluster, RolloutState.RUNNING)
        number = 0
        while (known := rollout(cluster)) is not None and known.is_active:
            await ask(cluster.control, make_call(second, request_id=f"r{number}"))
            number += 1
        assert known is not None and known.state is RolloutState.PROMOTED
        assert (await cluster.state.function("f")).current == second.version
        assert await operations(cluster) == ["rollout.promote"]
        health = cluster.control.cluster.rollout_health("f")
        assert health.candidate.ended == 0  # of none in progress


async def test_idle_versions_of_a_rollout_are_reported_and_others_are_not() -> None:
    async with open_cluster(2) as cluster:
        second = await begin(cluster)
        await until_state(cluster, RolloutState.RUNNING)
        await ask(cluster.control, make_call(second))

        def reported() -> set[tuple[int, int, int]]:
            return {
                (load.version, load.in_flight, load.traffic.ended)
                for report in cluster.control.state_cache.load_reports()
                for load in report.loads
            }

        await cluster.until(lambda: (second.version, 0, 1) in reported())
        await cluster.state.set_current("f", 1)
        await until_state(cluster, RolloutState.ABORTED)
        await ask(cluster.control, make_call(second, request_id="r2"))
        await cluster.until(lambda: not reported())
