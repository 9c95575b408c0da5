"""Calls through the dispatcher onto fake nodes."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from gateway.control.assembly import ControlSettings
from gateway.core.contract import Assigned, Deadlines, DispatchError, FunctionCall, WaitStage
from gateway.dispatch.admission import AdmissionLimits
from gateway.dispatch.outcomes import ReplicaOutcome
from gateway.fakes.node import tokens_after
from registry.errors import RemoteError, StateUnavailable
from registry.memory.state import MemoryState
from registry.messages.node import Generate, HandlerChunk, InvokeHandler, RequestUsage, Tokens
from registry.records.change import VersionLoad
from registry.records.function import FunctionTask, Scaling, ScalingMode
from tests.fixtures.control import ask, make_call, open_cluster


async def test_a_cold_call_starts_an_instance_and_is_served() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        answer = await ask(cluster.control, make_call(version))
        assert answer.ids == tokens_after((1, 2, 3), 4)
        assert answer.assigned.gpu_type == "fake"
        assert answer.assigned.queue_ms >= 0
        assert answer.stages[0].stage in {"queue", "start", "load", "fetch"}
        assert isinstance(answer.events[-1], RequestUsage)
        assert answer.usage.completion_tokens == 4

        reroute = await ask(cluster.control, make_call(version))
        assert reroute.assigned.start_kind == "hot"
        assert reroute.assigned.load_ms == 0
        assert cluster.counts("starts") == 1
        assert cluster.counts("store_reads") == 1


async def test_a_call_returns_the_kv_cache_that_it_took() -> None:
    """It may generate far more than its function's calls usually do."""
    async with open_cluster(1) as cluster:
        version = await cluster.deploy(Scaling(policy=ScalingMode.LOAD))
        await ask(cluster.control, make_call(version, tokens=4))
        dispatcher = cluster.control.dispatcher
        first, second = (
            dispatcher.enter(make_call(version, request_id=f"c{number}", tokens=1000)) for number in range(2)
        )
        assert first.instance is not None and second.instance is not None
        dispatcher.leave(first)
        assert f"kv_tokens={second.tokens.kv})" in repr(dispatcher.slots)
        dispatcher.leave(second)
        assert repr(dispatcher.slots) == "<Slots {}>"


async def test_what_was_served_is_counted_by_version() -> None:
    async with open_cluster(1) as cluster:
        version = await cluster.deploy()
        for number in range(3):
            await ask(cluster.control, make_call(version, request_id=f"r{number}", tokens=4))
        key = (version.function, version.version)
        served = cluster.control.cluster.traffic()[key]
        assert (served.requests, served.output_tokens, served.first_tokens) == (3, 12, 3)
        assert 0 < served.first_token_s < 60


async def test_200_calls_at_once_from_zero_all_succeed_with_one_store_read() -> None:
    async with open_cluster(4) as cluster:
        version = await cluster.deploy(Scaling(max_instances=3, target_concurrency=4))
        answers = await asyncio.gather(
            *(ask(cluster.control, make_call(version, request_id=f"r{i}", prompt=(i,))) for i in range(200))
        )
        assert [a.ids for a in answers] == [tokens_after((i,), 4) for i in range(200)]
        assert cluster.counts("starts") <= 3
        assert cluster.counts("store_reads") == 1
        assert max(node.counts["most_running"] for node in cluster.nodes.values()) <= 8
        assert cluster.control.stats().held == cluster.control.stats().in_flight == 0


async def test_leaving_early_cancels_on_the_node_at_once() -> None:
    async with open_cluster(1) as cluster:
        version = await cluster.deploy()
        async with cluster.control.dispatcher.run(make_call(version, tokens=10**6)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    break
        assert cluster.counts("cancelled") == 1
        assert cluster.control.stats().in_flight == 0


@pytest.mark.parametrize("where", ["held", "serving"])
async def test_a_cancelled_call_leaves_nothing_behind(where: str) -> None:
    async with open_cluster(1) as cluster:
        node = cluster.nodes["n0"]
        version = await cluster.deploy()
        gate = node.loading if where == "held" else node.token
        gate.close()
        task = asyncio.create_task(ask(cluster.control, make_call(version)))
        await gate.arrived()
        if where == "held":
            await cluster.control.changes.wait_for(lambda: cluster.control.stats().held == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cluster.control.stats().held == cluster.control.stats().in_flight == 0
        gate.open()
        await ask(cluster.control, make_call(version))


@pytest.mark.parametrize("code", ["draining", "no_such_instance", "overloaded"])
async def test_a_refusal_before_the_first_output_goes_unseen(code: str) -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        await cluster.control.cluster.scale("f", 2, (), wait=True)
        for node in cluster.nodes.values():
            node.call_errors.append(RemoteError(code, "no"))
        answers = await asyncio.gather(*(ask(cluster.control, make_call(version)) for _ in range(4)))
        assert [a.ids for a in answers] == [tokens_after((1, 2, 3), 4)] * 4
        assert cluster.control.stats().rerouted >= 1


async def test_an_instance_that_lost_its_engine_gets_no_call_for_a_while() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        await cluster.control.cluster.scale("f", 2, (), wait=True)
        node = cluster.nodes["n0"]
        node.call_errors = [RemoteError("pipeline_lost", "connection refused") for _ in range(20)]
        answers = [await ask(cluster.control, make_call(version)) for _ in range(4)]
        assert [answer.ids for answer in answers] == [tokens_after((1, 2, 3), 4)] * 4
        assert len(node.call_errors) >= 18


async def test_a_generation_goes_on_elsewhere_when_its_node_dies() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        await cluster.control.cluster.scale("f", 2, (), wait=True)
        for node in cluster.nodes.values():
            node.token.close()
        ids: list[int] = []
        assigned: list[Assigned] = []
        usage = None
        async with cluster.control.dispatcher.run(make_call(version, tokens=20)) as events:
            async for event in events:
                match event:
                    case Assigned(node=name):
                        assigned.append(event)
                        cluster.nodes[name].token.open()
                    case Tokens():
                        ids += event.ids
                        if len(ids) == 3:
                            await cluster.nodes[assigned[0].node].kill()
                            for node in cluster.nodes.values():
                                node.token.open()
                    case RequestUsage():
                        usage = event
        assert ids == tokens_after((1, 2, 3), 20)
        assert len(assigned) == 1
        assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (3, 20)
        assert cluster.control.stats().failovers == 1


async def test_a_call_that_goes_to_a_certain_instance_does_not_wait_for_others() -> None:
    async with open_cluster(1) as cluster:
        version = await cluster.deploy(Scaling(target_concurrency=4))
        await ask(cluster.control, make_call(version))  # an instance is ready
        dispatcher = cluster.control.dispatcher
        first, moves = (dispatcher.enter(make_call(version, request_id=name)) for name in ("a", "b"))
        there = first.instance
        assert there is not None and there is moves.instance
        moves.goes_to = there.instance_id
        dispatcher.reroute(moves, ReplicaOutcome.MOVED, failover=False)
        dispatcher.reroute(first, ReplicaOutcome.FULL, failover=False)
        dispatcher.pump()
        assert (first.instance, moves.instance) == (None, there)
        assert moves.goes_to == "" and not dispatcher._admission.queue(moves.key).moving
        dispatcher.leave(first)
        dispatcher.leave(moves)
        assert cluster.control.stats().held == cluster.control.stats().in_flight == 0


async def test_a_handler_is_repeated_before_its_first_output_only() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy(image=None, task=FunctionTask.HANDLER)
        await cluster.control.cluster.scale("f", 2, (), wait=True)
        work = InvokeHandler(request_id="r", instance_id="", body=b"{}")
        death: asyncio.FunctionTask[None] | None = None
        call = FunctionCall(request_id="r", tenant="t", version=version, work=work)
        for node in cluster.nodes.values():
            node.token.close()
        got = []
        async with cluster.control.dispatcher.run(call) as events:
            async for event in events:
                got.append(event)
                if isinstance(event, Assigned) and death is None:
                    victim = cluster.nodes[event.node]
                    death = asyncio.create_task(victim.kill())
                    for node in cluster.nodes.values():
                        if node is not victim:
                            node.token.open()
        assert death is not None
        await death
        assert [type(e) for e in got if not isinstance(e, WaitStage)] == [
            Assigned,
            Assigned,
            HandlerChunk,
        ]
        assert got[-1].usage is not None


async def test_errors_of_the_node_are_translated() -> None:
    async with open_cluster(1) as cluster:
        version = await cluster.deploy()
        await ask(cluster.control, make_call(version))
        for code, expected in {
            "bad_request": ("bad_request", 400),
            "handler_error": ("function_error", 500),
            "out_of_memory": ("bad_request", 400),
            "internal": ("internal", 500),
        }.items():
            cluster.nodes["n0"].call_errors.append(RemoteError(code, "because"))
            with pytest.raises(DispatchError, match="because") as caught:
                await ask(cluster.control, make_call(version))
            assert (caught.value.code, caught.value.status) == expected
            assert ("(request " in str(caught.value)) == (code == "handler_error")


async def test_a_node_gets_a_tokenizer_before_the_first_call_with_a_grammar() -> None:
    async with open_cluster(1) as cluster:
        version = replace(await cluster.deploy(), assets={"tokenizer.json": "ab" * 32})
        node = cluster.nodes["n0"]

        def guided(number: int) -> FunctionCall:
            call = make_call(version, request_id=f"g{number}")
            assert isinstance(call.work, Generate)
            sampling = msgspec.structs.replace(call.work.sampling, grammar="start: /a/", tokenizer="ab" * 32)
            work = msgspec.structs.replace(call.work, sampling=sampling)
            return msgspec.structs.replace(call, work=work)

        await ask(cluster.control, make_call(version, request_id="free"))
        assert node.tokenizers == []
        for number in range(2):
            await ask(cluster.control, guided(number))
        assert node.tokenizers == ["ab" * 32]
        node.call_errors.append(RemoteError("no_tokenizer", "dropped"))
        await ask(cluster.control, guided(3))
        assert node.tokenizers == ["ab" * 32] * 2


async def test_a_start_that_fails_everywhere_fails_the_held_calls_with_its_reason() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        for node in cluster.nodes.values():
            node.start_error = RemoteError("start_failed", "last line of the log")
        with pytest.raises(DispatchError, match="last line of the log") as caught:
            await ask(cluster.control, make_call(version))
        assert (caught.value.code, caught.value.status) == ("start_failed", 503)
        assert {node.counts["starts"] for node in cluster.nodes.values()} == {1}


async def test_a_start_that_fails_on_one_node_is_made_on_another() -> None:
    async with open_cluster(2) as cluster:
        version = await cluster.deploy()
        nearest = await cluster.first_holder(version)
        cluster.nodes[nearest].start_error = RemoteError("start_failed", "its log")
        answer = await ask(cluster.control, make_call(version))
        assert cluster.nodes[nearest].counts["starts"] == 1 and answer.assigned.node != nearest


async def test_a_function_that_can_run_nowhere_fails_at_once() -> None:
    async with open_cluster(1, gpu_bytes=1000) as cluster:
        version = await cluster.deploy()
        with pytest.raises(DispatchError, match="largest accelerator arena"):
            await ask(cluster.control, make_call(version))


async def test_without_nodes_a_call_is_held_until_its_limit() -> None:
    async with open_cluster(0) as cluster:
        version = await cluster.deploy()
        with pytest.raises(DispatchError) as caught:
            await ask(cluster.control, make_call(version, deadlines=Deadlines(start_s=0.05)))
        assert (caught.value.code, caught.value.status) == ("no_nodes", 503)
        held = asyncio.create_task(ask(cluster.control, make_call(version)))
        await cluster.add_node("late")
        assert (await held).assigned.node == "late"


@pytest.mark.parametrize(
    ("limit", "words"), [("start", "first output"), ("idle", "next output"), ("total", "whole request")]
)
async def test_limits_name_what_ran_out(limit: str, words: str) -> None:
    async with open_cluster(1) as cluster:
        node = cluster.nodes["n0"]
        version = await cluster.deploy()
        await ask(cluster.control, make_call(version))
        deadlines = {
            "start": Deadlines(start_s=0.05),
            "idle": Deadlines(idle_s=0.05),
            "total": Deadlines(total_s=0.05),
        }[limit]
        if limit != "idle":
            node.token.close()
        call = make_call(version, deadlines=deadlines)
        with pytest.raises(DispatchError, match=words) as caught:
            async with cluster.control.dispatcher.run(call) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        node.token.close()
        assert caught.value.status == 504


async def test_more_calls_than_may_wait_are_refused() -> None:
    settings = ControlSettings(limits=AdmissionLimits(held_per_function=2))
    async with open_cluster(1, settings=settings) as cluster:
        node = cluster.nodes["n0"]
        node.loading.close()
        version = await cluster.deploy()
        held = [asyncio.create_task(ask(cluster.control, make_call(version))) for _ in range(2)]
        await node.loading.arrived()
        with pytest.raises(DispatchError) as caught:
            await ask(cluster.control, make_call(version))
        assert (caught.value.code, caught.value.retry_after_s) == ("overloaded", 2)
        node.loading.open()
        assert [a.ids for a in await asyncio.gather(*held)] == [tokens_after((1, 2, 3), 4)] * 2


async def test_draining_finishes_what_is_there_and_refuses_the_rest() -> None:
    async with open_cluster(1) as cluster:
        node = cluster.nodes["n0"]
        node.token.close()
        version = await cluster.deploy()
        running = asyncio.create_task(ask(cluster.control, make_call(version)))
        await node.token.arrived()
        drained = asyncio.create_task(cluster.control.drain())
        await asyncio.sleep(0)
        with pytest.raises(DispatchError) as caught:
            await ask(cluster.control, make_call(version))
        assert caught.value.code == "draining"
        assert not drained.done()
        node.token.open()
        assert (await running).ids == tokens_after((1, 2, 3), 4)
        await drained


async def test_deleting_a_function_fails_the_calls_that_wait_and_stops_its_instances() -> None:
    async with open_cluster(1) as cluster:
        node = cluster.nodes["n0"]
        version = await cluster.deploy()
        node.loading.close()
        waiting = asyncio.create_task(ask(cluster.control, make_call(version)))
        await node.loading.arrived()
        await cluster.state.delete_function("f")
        with pytest.raises(DispatchError) as caught:
            await waiting
        assert caught.value.status == 404
        node.loading.open()
        await cluster.until_gone()


class ReadOnlyState(MemoryState):
    """A state that refuses load reports on demand, as Redis on a full disk does."""

    refusal = ""

    async def put_load_report(self, gateway: str, loads: Sequence[VersionLoad], ttl_s: float) -> None:
        """Store a load report, unless they are refused."""
        if self.refusal:
            raise StateUnavailable(self.refusal)
        await super().put_load_report(gateway, loads, ttl_s)


async def test_calls_that_wait_fail_with_the_reason_while_the_state_accepts_no_writes() -> None:
    state = ReadOnlyState()
    async with open_cluster(0, state=state) as cluster:
        version = await cluster.deploy()
        state.refusal = "MISCONF no space left"
        async with asyncio.timeout(20):
            with pytest.raises(DispatchError, match="MISCONF no space left") as failed:
                await ask(cluster.control, make_call(version))
        assert (failed.value.code, failed.value.status) == ("state_unavailable", 503)
        state.refusal = ""
        await cluster.add_node("n0")
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(DispatchError):  # until the next report is published
                    answer = await ask(cluster.control, make_call(version))
                    break
                await asyncio.sleep(0)
        assert answer.ids == tokens_after((1, 2, 3), 4)
