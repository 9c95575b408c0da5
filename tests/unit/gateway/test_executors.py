"""Executors: tenants in turn, bounded queues, and what a cancelled call leaves."""

import asyncio
import threading

import pytest

from gateway.core.errors import Unavailable
from gateway.core.executors import ExecutorBounds, FairExecutor
from tests.fixtures.patience import until


async def test_a_tenant_with_a_long_queue_delays_no_other() -> None:
    executor, gate = FairExecutor("work", ExecutorBounds(threads=2)), threading.Event()
    greedy = [asyncio.create_task(executor.run("greedy", 1, gate.wait)) for _ in range(100)]
    await until(lambda: "running=1" in repr(executor))
    async with asyncio.timeout(10):
        assert await executor.run("other", 1, lambda: "done") == "done"
    assert not any(task.done() for task in greedy)
    gate.set()
    assert await asyncio.gather(*greedy) == [True] * 100
    assert repr(executor) == "<FairExecutor work running=0 jobs=0>"
    executor.close()


async def test_tenants_take_turns() -> None:
    executor, order, gate = FairExecutor("work", ExecutorBounds(threads=1)), list[str](), threading.Event()
    first = asyncio.create_task(executor.run("a", 1, gate.wait))
    await asyncio.sleep(0)
    tasks = [
        asyncio.create_task(executor.run(tenant, 1, order.append, tenant))
        for tenant in ("a", "a", "a", "b", "b", "c")
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *tasks)
    assert order == ["a", "b", "c", "a", "b", "a"]
    executor.close()


async def test_jobs_and_bytes_are_bounded_in_all_and_for_a_tenant() -> None:
    executor, gate = FairExecutor("work", ExecutorBounds(threads=1, jobs=8, job_bytes=80)), threading.Event()
    tasks = [asyncio.create_task(executor.run("a", 1, gate.wait)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="this tenant"):
        await executor.run("a", 1, gate.wait)
    with pytest.raises(Unavailable, match="this tenant"):
        await executor.run("b", 41, gate.wait)
    tasks += [asyncio.create_task(executor.run("b", 20, gate.wait)) for _ in range(2)]
    tasks.append(asyncio.create_task(executor.run("c", 36, gate.wait)))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="too many requests wait"):
        await executor.run("d", 1, gate.wait)
    gate.set()
    await asyncio.gather(*tasks)
    assert await executor.run("d", 40, lambda: 1) == 1
    executor.close()


async def test_a_cancelled_call_leaves_the_queue_and_errors_reach_their_caller() -> None:
    executor, gate, ran = FairExecutor("work", ExecutorBounds(threads=1)), threading.Event(), list[int]()
    running = asyncio.create_task(executor.run("a", 1, gate.wait))
    queued = asyncio.create_task(executor.run("a", 1, ran.append, 1))
    await asyncio.sleep(0)
    for task in (running, queued):
        task.cancel()
    await asyncio.wait([running, queued])
    assert repr(executor) == "<FairExecutor work running=1 jobs=1>"  # a thread goes on to its end
    gate.set()
    with pytest.raises(ZeroDivisionError):
        await executor.run("b", 1, lambda: 1 / 0)
    assert ran == [] and repr(executor) == "<FairExecutor work running=0 jobs=0>"
    executor.close()


async def test_closing_ends_queued_jobs_with_an_error_and_lets_running_ones_end() -> None:
    executor, gate, ran = FairExecutor("work", ExecutorBounds(threads=1)), threading.Event(), list[int]()
    running = asyncio.create_task(executor.run("a", 1, gate.wait))
    queued = [asyncio.create_task(executor.run(tenant, 1, ran.append, 1)) for tenant in ("a", "b", "b")]
    left = asyncio.create_task(executor.run("c", 1, ran.append, 1))
    await asyncio.sleep(0)
    left.cancel()
    executor.close()
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*queued, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * 3
    assert "stopping" in str(outcomes[0]) and repr(executor) == "<FairExecutor work running=1 jobs=1>"
    with pytest.raises(Unavailable, match="stopping"):
        await executor.run("d", 1, lambda: 1)
    gate.set()
    assert await running is True and ran == []
    with pytest.raises(asyncio.CancelledError):
        await left
    assert repr(executor) == "<FairExecutor work running=0 jobs=0>"
