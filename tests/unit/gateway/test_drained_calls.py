"""Running generations leave an instance that is to stop, while another one has room for them."""

import asyncio
from dataclasses import replace

from gateway.control.assembly import ControlSettings
from gateway.fakes.node import FakeNode, tokens_after
from registry.messages.node import Generate
from registry.records.function import FunctionVersion, Scaling
from registry.records.instance import InstanceState
from registry.records.live import LiveMode
from tests.fixtures.control import FAST, Answer, FakeCluster, ask, make_call, open_cluster
from tests.fixtures.patience import until

TOKENS = 600


async def two_instances(cluster: FakeCluster, calls: int) -> FunctionVersion:
    version = await cluster.deploy(Scaling(target_concurrency=calls, live=LiveMode.OFF))
    await cluster.control.cluster.scale("f", 2, (), wait=True)
    return version


def send(cluster: FakeCluster, version: FunctionVersion, number: int) -> "asyncio.Task[Answer]":
    call = make_call(version, request_id=f"r{number}", prompt=(number,), tokens=TOKENS)
    return asyncio.create_task(ask(cluster.control, call))


async def check_answers(tasks: "list[asyncio.Task[Answer]]") -> None:
    """Await the calls, which were sent with the numbers from 0 on, and compare all of their tokens."""
    for number, answer in enumerate(await asyncio.gather(*tasks)):
        assert answer.ids == tokens_after((number,), TOKENS)
        assert answer.usage.completion_tokens == TOKENS


def begun(node: FakeNode) -> int:
    """Return how many calls have had a token of the node."""
    return sum(used_us > 0 for used_us in node.used_us.values())


async def stop_one(cluster: FakeCluster) -> FakeNode:
    """Hold the tokens of all nodes and scale to one instance; return the other one's node, which drains."""
    cluster.hold_tokens()
    await cluster.control.cluster.scale("f", 1, (), wait=False)

    def draining() -> list[str]:
        instances = cluster.control.state_cache.instances()
        return [one.node for one in instances if one.state is InstanceState.DRAINING]

    await cluster.until(lambda: bool(draining()))
    return cluster.nodes[draining()[0]]


def continued(cluster: FakeCluster) -> list[Generate]:
    """Return the calls that were sent with tokens of another instance."""
    return [work for node in cluster.nodes.values() for work in node.asked if work.generated_ids]


async def test_they_continue_elsewhere_with_their_kv_cache() -> None:
    async with open_cluster(2) as cluster:
        version = await two_instances(cluster, 8)
        tasks = [send(cluster, version, number) for number in range(4)]
        await until(lambda: [begun(node) for node in cluster.nodes.values()] == [2, 2])
        left = await stop_one(cluster)
        await until(lambda: bool(left.leaving))
        cluster.give_tokens()
        await cluster.until(lambda: len(cluster.control.state_cache.instances()) == 1)
        assert not any(task.done() for task in tasks), "the instance waited for them"
        await check_answers(tasks)
        moved = continued(cluster)
        assert len(moved) == 2 and all(work.kv is not None for work in moved)
        stats = cluster.control.stats()
        assert (stats.moved, stats.failovers, stats.in_flight) == (2, 0, 0)
        assert repr(cluster.control.dispatcher.slots) == "<Slots {}>"


def fill(cluster: FakeCluster) -> None:
    """Take all free slots of each instance, as further calls of this gateway would."""
    slots = cluster.control.dispatcher.slots
    for instance in cluster.ready():
        while slots.room(instance):
            slots.acquire(instance.instance_id)


async def test_they_stay_while_no_other_instance_has_room() -> None:
    async with open_cluster(2) as cluster:
        version = await two_instances(cluster, 4)
        tasks = [send(cluster, version, number) for number in range(4)]
        await until(lambda: [begun(node) for node in cluster.nodes.values()] == [2, 2])
        fill(cluster)
        left = await stop_one(cluster)
        cluster.give_tokens()
        await check_answers(tasks)
        assert not left.leaving and cluster.control.stats().moved == 0


async def test_one_leaves_as_another_ends() -> None:
    async with open_cluster(2) as cluster:
        version = await two_instances(cluster, 2)
        tasks = [send(cluster, version, number) for number in range(2)]
        await until(lambda: [begun(node) for node in cluster.nodes.values()] == [1, 1])
        fill(cluster)
        left = await stop_one(cluster)
        (kept,) = [node for node in cluster.nodes.values() if node is not left]
        assert not left.leaving
        kept.token.open()
        await until(lambda: bool(left.leaving))
        left.token.open()
        await check_answers(tasks)
        assert cluster.control.stats().moved == 1


async def test_they_end_there_if_the_operator_wants_that() -> None:
    settings: ControlSettings = replace(FAST, moves_on_drain=False)
    async with open_cluster(2, settings=settings) as cluster:
        version = await two_instances(cluster, 8)
        tasks = [send(cluster, version, number) for number in range(4)]
        await until(lambda: [begun(node) for node in cluster.nodes.values()] == [2, 2])
        await stop_one(cluster)
        cluster.give_tokens()
        await check_answers(tasks)
        assert cluster.control.stats().moved == 0 and not continued(cluster)
