"""The trace of a request over the links of a real pipeline, exported by each of its nodes."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from invoker.engine.stage_contract import OpenSequence
from invoker.prefill.frames import PromptOffer
from registry.messages.node import Generate
from registry.messages.sampling import Sampling
from registry.tracing.context import SpanContext
from tests.fixtures.otlp import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stages import CUTS, answer, let_serve, live_cluster, open_pipeline, requests_for

GATEWAY = SpanContext(0xABC, 0xDEF, "vendor=1")


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


def test_stages_of_an_earlier_release_read_steps_and_offers_with_a_trace() -> None:
    class EarlierOpening(msgspec.Struct, frozen=True, kw_only=True):
        sequence: str
        max_tokens: int
        sampling: Sampling
        call: str = ""
        prompt_tokens: int = 0
        tokens: tuple[int, ...] = ()

    class EarlierOffer(msgspec.Struct, frozen=True, array_like=True):
        name: str
        call: str
        tokens: int

    opening = OpenSequence(
        sequence="s", max_tokens=9, sampling=Sampling(max_tokens=4), call="r", trace=GATEWAY.message()
    )
    earlier = msgspec.msgpack.decode(msgspec.msgpack.encode(opening), type=EarlierOpening)
    assert (earlier.sequence, earlier.call) == ("s", "r")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(earlier), type=OpenSequence).trace is None
    offer = PromptOffer("p", "r", 7, GATEWAY.message())
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(offer), type=EarlierOffer)
    assert (read.name, read.call, read.tokens) == ("p", "r", 7)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(read), type=PromptOffer) == PromptOffer("p", "r", 7)


def traced(request: Generate) -> Generate:
    return msgspec.structs.replace(request, trace=GATEWAY.message())


def of_trace(receiver: OtlpReceiver) -> list[ReceivedSpan]:
    return receiver.spans(trace_id=GATEWAY.trace_name)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
async def test_all_stages_of_a_pipeline_are_in_the_trace_of_the_request(
    tmp_path: Path, kind: str, receiver: OtlpReceiver
) -> None:
    flags = ("--otlp-endpoint", receiver.endpoint)
    async with asyncio.timeout(2 * PATIENCE_S), live_cluster(tmp_path, kind, 3, flags=flags) as live:
        let_serve(live)
        async with open_pipeline(live, CUTS):
            first, second = requests_for(live, 2)
            expected = live.expected([first, second])
            got = await asyncio.gather(
                *(answer(live.head.node, request) for request in (traced(first), second))
            )
            assert [one.ids for one in got] == list(expected.values())
        head = live.head.node.settings.node_id
    # Each node has exported its spans at its end.
    spans = of_trace(receiver)
    (own,) = [span for span in spans if span.name == "generate"]
    assert (own.instance, own.parent_id, own.state) == (head, f"{GATEWAY.span_id:016x}", "vendor=1")
    stages = sorted((one for one in spans if one.name == "stage"), key=lambda one: one.instance)
    assert [one.instance for one in stages] == ["n0", "n1", "n2"]
    assert {one.parent_id for one in stages} == {own.span_id}
    layers = [
        (one.attributes["hypercast.first_layer"], one.attributes["hypercast.last_layer"]) for one in stages
    ]
    assert layers == [(first, last - 1) for first, last in pairwise(CUTS)]
    for stage in stages:
        assert stage.attributes["hypercast.call_id"] == first.request_id
        assert stage.attributes["hypercast.steps"] >= first.sampling.max_tokens
        assert 0 < stage.attributes["hypercast.busy_ms"] <= (stage.end_ns - stage.start_ns) / 1e6 + 1
    names = {span.name for span in spans}
    assert {"generate", "prefill", "decode", "stage"} == names
    # Nothing of the other request, which has no trace.
    assert {span.attributes.get("hypercast.call_id", first.request_id) for span in spans} == {
        first.request_id
    }
