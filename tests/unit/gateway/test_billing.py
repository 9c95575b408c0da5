"""Bills of requests: the same after a failover, each written once, also by a ledger that was away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

from gateway.billing.outbox import Outbox
from gateway.billing.outbox_record import OutboxRecord
from gateway.billing.request_record import make_record
from gateway.core.contract import CallUsage
from gateway.core.request_context import RequestContext
from gateway.fakes.node import OUTPUT_US
from gateway.tenants.state_health import HealthCheck
from registry.clock import SystemClock
from registry.config.secrets import new_api_key
from registry.errors import StateUnavailable
from registry.memory.ledger import MemoryLedger
from registry.messages.node import Generate
from registry.records.api_key import KeyRole
from registry.records.change import InstanceChanged
from registry.records.function import Scaling
from registry.records.instance import InstanceState
from registry.records.usage import RequestRecord, RequestStatus
from registry.state import UsageFilter
from tests.fixtures.control import FakeCluster, ask, make_call, open_cluster
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.registry_records import request


@asynccontextmanager
async def whole(nodes: int = 2, **options: Any) -> AsyncIterator[tuple[Gateway, FakeCluster]]:
    """Yield a gateway from HTTP down to fake nodes, with an instance of `coder` ready on each."""
    async with (
        open_cluster(nodes, **options) as cluster,
        gateway(state=cluster.state, control=cluster.control) as gw,
    ):
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await cluster.control.changes.wait_for(
            lambda: cluster.control.state_cache.current("coder") is not None
        )
        await cluster.control.cluster.scale("coder", nodes, (), wait=True)
        yield gw, cluster


async def test_what_is_in_the_ledger_is_settled_with_its_nodes() -> None:
    async with whole() as (gw, cluster):
        client = gw.openai()
        await asyncio.gather(
            *(client.completions.create(model="coder", prompt="x", max_tokens=5, n=2) for _ in range(40))
        )
        for node in cluster.nodes.values():
            await node.settles()
        (row,) = await gw.state.report(UsageFilter())
        records, _ = await gw.state.requests(UsageFilter())
        slices = [one for record in records for one in record.gpu]
        assert len(slices) == 80 and all(one.gpu_us == 5 * OUTPUT_US for one in slices)
        assert {one.node for one in slices} == set(cluster.nodes)
        assert row.billed_gpu_ms == sum(-(-sum(g.gpu_us for g in r.gpu) // 1000) for r in records) == 40
        assert not any(node.lost_us for node in cluster.nodes.values())


BODY: dict[str, Any] = {
    "model": "coder",
    "prompt": "x",
    "max_tokens": 12,
    "n": 3,
    "temperature": 0,
    "logprobs": 1,
}


async def stream_text(
    gw: Gateway, **options: Any
) -> tuple[dict[int, str], dict[int, list[float]], dict[int, str], Any]:
    """Return a stream's text, logprobs and finish reasons by choice, and its usage."""
    text: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    reasons: dict[int, str] = {}
    usage = None
    stream = await gw.openai().completions.create(
        **{**BODY, **options}, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + choice.text
            if choice.logprobs:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return text, logprobs, reasons, usage


@pytest.mark.parametrize("stop", [None, "cut"])
@pytest.mark.parametrize("dies_after", [1, 2, 5, 11])
async def test_a_failover_changes_nothing_of_the_answer(dies_after: int, stop: str | None) -> None:
    async with whole(3, vocabulary=257) as (gw, cluster):
        options: dict[str, Any] = {"max_tokens": 12}
        if stop:
            plain, *_ = await stream_text(gw)
            options["stop"] = [plain[0][5:7]]
        calm = await stream_text(gw, **options)
        for name in ("n0", "n1"):  # and each in turn: what went on elsewhere goes on again
            cluster.nodes[name].dies_after = dies_after
        shaken = await stream_text(gw, **options)
        assert shaken == calm
        assert set(calm[2].values()) == {"stop" if stop else "length"}
        if not stop:
            assert all(len(found) == 12 for found in calm[1].values())
            assert calm[3].completion_tokens == 36
            assert cluster.control.stats().failovers >= 1
        records, _ = await gw.state.requests(UsageFilter())
        assert [r.completion_tokens for r in records[-2:]] == [calm[3].completion_tokens] * 2
        reported = {one.call_id: one.gpu_us for record in records for one in record.gpu}
        for node in cluster.nodes.values():
            if node.alive:
                await node.settles()
            assert all(lost_us >= reported.get(call, 0) for call, lost_us in node.lost_us.items())


async def test_sampled_text_goes_on_with_the_same_draws_though_no_seed_was_given() -> None:
    async with whole(2, vocabulary=257) as (gw, cluster):
        for node in cluster.nodes.values():
            node.dies_after = 4
            break
        await asyncio.gather(*(stream_text(gw, temperature=0.9) for _ in range(2)))
        asked = [work for node in cluster.nodes.values() for work in node.asked]
        parts: dict[str, list[Generate]] = {}
        for work in asked:
            parts.setdefault(work.request_id.split("+")[0], []).append(work)
        resumed = [works for works in parts.values() if len(works) > 1]
        assert resumed and all(a.sampling == b.sampling for a, b in resumed)
        assert any(b.generated_ids for _, b in resumed)
        assert len({works[0].sampling.seed for works in parts.values()}) == len(parts) == 6
        assert {work.tenant for work in asked} == {"acme"}


class Redis(MemoryLedger):
    """A ledger that can be away; while it is `deaf` what is written arrives, but no answer comes."""

    def __init__(self) -> None:
        super().__init__()
        self.away = self.deaf = False

    async def add_request(self, record: RequestRecord) -> bool:
        if self.deaf:
            await super().add_request(record)
        self._check()
        return await super().add_request(record)

    async def request(self, request_id: str) -> RequestRecord:
        self._check()
        return await super().request(request_id)

    async def void_request(self, record: RequestRecord) -> bool:
        self._check()
        return await super().void_request(record)

    def _check(self) -> None:
        if self.away or self.deaf:
            raise StateUnavailable("connection refused")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bill_that_cannot_be_written_fails_the_request_and_is_written_later(
    stream: bool,
) -> None:
    ledger = Redis()
    async with gateway(ledger=ledger) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        gw.services.biller.pauses_s = (0.0, 0.0)
        ledger.away = True
        client = gw.openai()
        headers = {"x-request-id": "mine"}
        if stream:
            answer = await client.completions.create(
                model="coder", prompt="x", max_tokens=2, stream=True, extra_headers=headers
            )
            with pytest.raises(openai.APIError, match="could not be billed"):
                [chunk async for chunk in answer]
        else:
            with pytest.raises(openai.InternalServerError) as refused:
                await client.completions.create(
                    model="coder", prompt="x", max_tokens=2, extra_headers=headers
                )
            assert refused.value.code == "billing_failed"
            assert refused.value.response.headers["retry-after"]
        assert len(gw.services.biller.outbox) == 1 and not gw.settled
        assert "hypercast_outbox_records 1.0" in gw.services.metrics.render().decode()
        ledger.away = False
        assert await gw.services.biller.outbox.drain()
        (record,) = await ledger.requests_by_client_id("mine")
        assert (record.status, record.cost_nanos) == (RequestStatus.FAILED, 0)
        assert (record.billed_gpu_ms, record.completion_tokens) == (1, 2)
        assert [use.gpu for use in gw.settled] == list(record.gpu)


async def test_a_request_starts_when_an_instance_takes_it_however_long_its_body_took() -> None:
    async with open_cluster(1) as cluster:
        version = await cluster.deploy()
        await ask(cluster.control, make_call(version, request_id="warm"))
        clock, health = SystemClock(), HealthCheck(cluster.state)
        context = RequestContext(
            request_id="r", received_at=clock.wall_s() - 60, received_s=clock.monotonic_s() - 60
        )
        context.key = new_api_key("acme", KeyRole.CALLER, "").key
        before = clock.wall_s()
        async with cluster.control.dispatcher.run(make_call(version)) as run:
            async for _ in run:
                pass
        record = make_record(
            context=context,
            version=version,
            runs=[run],
            uses=run.used,
            status=RequestStatus.OK,
            ended_at=clock.wall_s(),
            health=health,
        )
        assert record is not None and before - 30 <= record.started_at <= record.ended_at


async def test_the_spool_writes_each_record_once_and_is_bounded() -> None:
    ledger = Redis()
    settled: list[CallUsage] = []
    outbox = Outbox(ledger, settled.extend, max_records=3)
    running = asyncio.create_task(outbox.run())
    ledger.deaf = True
    entries = [OutboxRecord(request(f"r{i}"), ()) for i in range(4)]
    for entry in entries:
        with pytest.raises(StateUnavailable):
            await entry.write(ledger)
        entry.void()
        outbox.add(entry)
    assert len(outbox) == 3
    ledger.deaf = False
    assert await outbox.drain()
    running.cancel()
    records, _ = await ledger.requests(UsageFilter())
    assert sorted(record.request_id for record in records) == ["r0", "r1", "r2", "r3"]
    # All were there as good ones already; that of r0 was dropped before it could be made a failed one.
    assert [record.request_id for record in records if record.status is RequestStatus.OK] == ["r0"]
    assert (await ledger.report(UsageFilter()))[0].cost_nanos == records[0].cost_nanos


async def test_each_start_is_observed_once_and_gpu_seconds_come_from_the_nodes() -> None:
    async with open_cluster(1) as cluster:
        async with gateway(state=cluster.state, control=cluster.control) as gw:
            metrics = gw.services.metrics
            cluster.control.state_cache.subscribe_ready(metrics.note_start)
            await cluster.deploy(Scaling(min_instances=1))
            await cluster.until_ready(1)
            (ready,) = cluster.ready()
            timed = replace(ready, phases_ms={"fetch": 30.0, "copy": 5.0})
            for state in (InstanceState.LOADING, InstanceState.READY, InstanceState.READY):
                record = replace(timed, instance_id="timed", state=state)
                cluster.control.state_cache.apply(InstanceChanged(record=record), 0)
            text = metrics.render().decode()
            assert 'hypercast_init_duration_seconds_count{function="f",stage="fetch"} 1.0' in text
            node = replace(
                cluster.nodes["n0"].record, counters={"busy_us": 2_500_000, "loading_us": 1, "idle_us": 0}
            )
            await gw.state.put_node(node, 60)
            await gw.cluster.refresh()
            text = metrics.render().decode()
            assert 'hypercast_gpu_seconds_total{kind="busy",node="n0"} 2.5' in text
            assert 'hypercast_gpu_seconds_total{kind="idle",node="n0"} 0.0' in text
