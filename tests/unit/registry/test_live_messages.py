"""Messages of live serving: what is sent is what comes, and what is out of bounds is refused."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.channel.frames import MALFORMED
from registry.messages.live import (
    MAX_HELD_BYTES,
    MAX_LEAVING,
    MAX_STAGES,
    HandOffCalls,
    LinkStage,
    OpenPipeline,
    OpenStage,
    PipelineOpened,
    StageOpened,
    StageSpec,
    decode_layer_set,
    encode_layer_set,
    pipeline_name,
)
from registry.messages.node import Generate, InstanceProgress, Reply, Request, StartInstance
from registry.messages.sampling import Sampling

REQUESTS = msgspec.msgpack.Decoder(Request)
REPLIES = msgspec.msgpack.Decoder(Reply)

STAGES = tuple(
    StageSpec(
        node=f"node-{place}", address=f"tcp://10.0.0.{place}:80", instance=f"i{place}", first=f, last=to
    )
    for place, (f, to) in enumerate([(0, 3), (3, 5), (5, 8)])
)
OPEN = OpenPipeline(pipeline="p7", epoch=2, stages=STAGES)
STAGE = OpenStage(pipeline="p7", epoch=2, place=1, instance="i1", first=3, last=5)
ASKED = [
    OPEN,
    STAGE,
    HandOffCalls(pipeline="p7", epoch=2, request_ids=("a", "b+1")),
    LinkStage(pipeline="p7", epoch=0, place=1, to=2, following="tcp://10.0.0.2:81", host="h2"),
    Generate(
        request_id="a", instance_id="i2", prompt_ids=(1,), sampling=Sampling(max_tokens=3), pipeline="p7.2"
    ),
    StartInstance(
        instance_id="i1",
        function="f",
        version=1,
        task="generate",
        dtype="float32",
        context_length=64,
        max_concurrency=2,
        assets={},
        live=True,
    ),
]
TOLD = [
    PipelineOpened(),
    StageOpened(link="tcp://10.0.0.1:99", host="h1", pages=12),
    InstanceProgress(stage="fetch", fraction=0.5, held=encode_layer_set(0b101)),
]


def test_messages_survive_the_wire() -> None:
    for request in ASKED:
        assert REQUESTS.decode(msgspec.msgpack.encode(request)) == request
    for reply in TOLD:
        assert REPLIES.decode(msgspec.msgpack.encode(reply)) == reply


@given(st.integers(0, 2 ** (8 * MAX_HELD_BYTES) - 1))
def test_layers_are_bits_of_bytes(layers: int) -> None:
    held = encode_layer_set(layers)
    assert len(held) <= MAX_HELD_BYTES and decode_layer_set(held) == layers
    assert all(bool(held[i // 8] >> i % 8 & 1) == bool(layers >> i & 1) for i in range(8 * len(held)))


def test_a_pipeline_has_one_name() -> None:
    assert pipeline_name(OPEN.pipeline, OPEN.epoch) == "p7.2"


@pytest.mark.parametrize(
    "bad",
    [
        msgspec.structs.replace(OPEN, stages=()),
        msgspec.structs.replace(OPEN, stages=STAGES[:1] * (MAX_STAGES + 1)),
        msgspec.structs.replace(OPEN, pipeline=""),
        msgspec.structs.replace(OPEN, pipeline="p" * 129),
        msgspec.structs.replace(OPEN, epoch=-1),
        msgspec.structs.replace(OPEN, stages=(STAGES[0], msgspec.structs.replace(STAGES[1], first=-1))),
        msgspec.structs.replace(STAGE, place=MAX_STAGES),
        HandOffCalls(pipeline="p", epoch=0, request_ids=("a",) * (MAX_LEAVING + 1)),
        LinkStage(pipeline="p", epoch=0, place=0, to=1, following="x" * 513, host="h"),
        InstanceProgress(stage="fetch", fraction=0.5, held=b"\1" * (MAX_HELD_BYTES + 1)),
    ],
    ids=repr,
)
def test_what_is_out_of_bounds_is_refused(bad: object) -> None:
    decoder = REPLIES if isinstance(bad, InstanceProgress) else REQUESTS
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(bad))


def test_damage_is_refused_or_read_as_something_else() -> None:
    random_ = random.Random(7)
    for message in [*ASKED, *TOLD]:
        whole = msgspec.msgpack.encode(message)
        for _ in range(300):
            raw = bytearray(whole)
            for _ in range(random_.randint(1, 4)):
                raw[random_.randrange(len(raw))] = random_.randrange(256)
            for decoder in (REQUESTS, REPLIES):
                try:
                    decoder.decode(raw[: random_.randint(0, 2 * len(raw))])
                except MALFORMED:
                    continue
