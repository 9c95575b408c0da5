"""A node that loads helps a ready one with its prompts: the tokens are those of a whole engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from registry.errors import RemoteError
from registry.messages.live import HandOffCalls, PipelineOpened
from registry.messages.node import CallsUsed, EndCalls, Generate, StopInstance
from registry.tracing.context import SpanContext
from tests.fixtures.otlp import otlp_receiver
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stages import Answer, answer, live_cluster
from tests.fixtures.zigzag import Pair, WatchedEngines


@asynccontextmanager
async def pair_of(folder: Path, kind: str, layers: int, *flags: str) -> AsyncIterator[Pair]:
    """Yield a pair: the target has loaded `layers` layers; the source is ready, but its engine waits."""
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        live_cluster(folder, kind, 2, make_engines=WatchedEngines, flags=flags) as live,
    ):
        pair = Pair(live)
        pair.target.source.release(0, layers)
        try:
            await pair.source.until_ready()
            yield pair
        finally:
            pair.source_engines.gate.open()


async def used_at_target(pair: Pair, requests: list[Generate]) -> dict[str, int]:
    (used,) = await pair.target.node.ask(EndCalls(request_ids=tuple(one.request_id for one in requests)))
    assert isinstance(used, CallsUsed)
    return dict(used.gpu_us)


async def ask(pair: Pair, requests: list[Generate], ran: int) -> list[asyncio.Task[Answer]]:
    """Wait until the source runs the first prompt and the target has run `ran` layers of the others."""
    source = pair.source.node
    first = asyncio.create_task(answer(source, requests[0]))
    await pair.source_engines.gate_reached.reaches(1)
    asked = [first, *(asyncio.create_task(answer(source, one)) for one in requests[1:])]
    await pair.target_engines.ran.reaches(ran)
    return asked


async def finish(pair: Pair, requests: list[Generate], asked: list[asyncio.Task[Answer]]) -> None:
    """Let the source go on, and check what comes."""
    pair.source_engines.gate.open()
    check(pair, requests, await asyncio.gather(*asked))


def check(pair: Pair, requests: list[Generate], answers: list[Answer]) -> None:
    expected = pair.live.expected(requests)
    for request, got in zip(requests, answers, strict=True):
        assert got.ids == expected[request.request_id] and got.finish_reason == "length"
        assert got.usage is not None and got.usage.gpu_us > 0


@pytest.mark.parametrize(("kind", "layers"), [("llama", 1), ("qwen2-tied", 2), ("gpt2", 3)])
async def test_the_tokens_of_prompts_that_were_helped_with_are_a_whole_engines(
    tmp_path: Path, kind: str, layers: int
) -> None:
    async with pair_of(tmp_path, kind, layers) as pair, pair.opened() as opened:
        assert isinstance(opened, PipelineOpened)
        requests = pair.requests(6)
        await finish(pair, requests, await ask(pair, requests, layers * 5))
        assert pair.source_engines.engines[0].kept == 5
        used = await used_at_target(pair, requests)
        assert not used.get("r0") and all(used[one.request_id] > 0 for one in requests[1:])


async def test_layers_that_land_meanwhile_are_run_too(tmp_path: Path) -> None:
    async with pair_of(tmp_path, "llama", 1) as pair, pair.opened():
        requests = pair.requests(4)
        asked = await ask(pair, requests, 3)
        pair.target.source.release(1, 2)
        await pair.target_engines.ran.reaches(6)
        pair.target.source.release_all()  # the last layer is the source's nevertheless
        await pair.target_engines.ran.reaches(9)
        assert pair.target.task is not None
        await asyncio.shield(pair.target.task)  # it is ready, and helps on until the pair is closed
        await finish(pair, requests, asked)
        assert pair.source_engines.engines[0].kept == 3


async def test_the_layers_that_the_target_ran_are_in_the_trace_of_a_prompt(tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        gateway = SpanContext(0xABC, 0xDEF)
        async with (
            pair_of(tmp_path, "llama", 2, "--otlp-endpoint", receiver.endpoint) as pair,
            pair.opened(),
        ):
            requests = pair.requests(3)
            requests[1] = msgspec.structs.replace(requests[1], trace=gateway.message())
            await finish(pair, requests, await ask(pair, requests, 4))
        spans = receiver.spans(trace_id=gateway.trace_name)
    (own,) = [span for span in spans if span.name == "generate"]
    (layers,) = [span for span in spans if span.name == "prefill layers"]
    assert (own.instance, layers.instance) == ("n1", "n0") and layers.parent_id == own.span_id
    assert layers.attributes["hypercast.steps"] == 2
    assert layers.attributes["hypercast.call_id"] == requests[1].request_id


async def test_a_target_that_is_lost_loses_nothing(tmp_path: Path) -> None:
    async with pair_of(tmp_path, "llama", 2) as pair:
        requests = pair.requests(5)
        source = pair.source.node
        async with source.channel.call(await pair.opening()) as replies:
            assert isinstance(await anext(replies), PipelineOpened)
            asked = await ask(pair, requests, 8)
            await pair.target.node.ask(StopInstance(instance_id=pair.target.instance, grace_s=0.0))
            with pytest.raises(RemoteError, match=r"n0: .*i0 has ended") as lost:
                await anext(replies)
            assert lost.value.code == "pipeline_lost"
        await finish(pair, requests, asked)
        with pytest.raises(RemoteError) as gone:
            await answer(source, requests[0])
        assert gone.value.code == "no_such_pipeline"


async def test_at_the_end_only_prompts_that_wait_are_moved(tmp_path: Path) -> None:
    async with pair_of(tmp_path, "llama", 2) as pair:
        requests = pair.requests(4)
        async with pair.opened():
            asked = await ask(pair, requests, 6)
            leave = HandOffCalls(pipeline="p", epoch=0, request_ids=("r0", "r2", "elsewhere"))
            await pair.source.node.ask(leave)
            moved = await asked[2]
            assert moved.finish_reason == "moved" and moved.ids == []
            assert not asked[0].done() and not asked[1].done()
        for one in (asked[1], asked[3]):
            got = await one
            assert got.finish_reason == "moved" and got.ids == [] and got.usage is not None
        await finish(pair, requests[:1], asked[:1])


async def test_a_call_that_is_left_while_it_waits_holds_nobody_up(tmp_path: Path) -> None:
    async with pair_of(tmp_path, "gpt2", 2) as pair, pair.opened():
        requests = pair.requests(5)
        asked = await ask(pair, requests, 8)
        for left in (0, 1, 3):
            asked[left].cancel()
        await asyncio.wait([asked[left] for left in (0, 1, 3)])
        await finish(pair, [requests[2], requests[4]], [asked[2], asked[4]])
        again = [msgspec.structs.replace(one, request_id=f"{one.request_id}+1") for one in requests]
        check(pair, again, list(await asyncio.gather(*(answer(pair.source.node, one) for one in again))))


async def test_what_is_no_pair_is_refused(tmp_path: Path) -> None:
    async with pair_of(tmp_path, "llama", 2) as pair:
        opening = await pair.opening()
        turned = msgspec.structs.replace(opening, stages=opening.stages[:1] * 2)
        with pytest.raises(RemoteError, match="ranges are not contiguous"):
            await pair.source.node.ask(turned)
        other = await pair.live.stages((0, 1, 4))
        first, last = other
        swapped = (
            msgspec.structs.replace(last, first=0, last=1),
            msgspec.structs.replace(first, first=1, last=4),
        )
        with pytest.raises(RemoteError, match="a pair is a loading node"):
            await pair.source.node.ask(msgspec.structs.replace(opening, stages=swapped))
