"""Frames between stages: what is sent is what comes, however it is cut; damage is a clear error."""

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invoker.engine.stage_contract import OpenSequence, StageChunk, StageStep, rows_as_bytes
from invoker.engine.stage_rows import StageRows
from invoker.links.frames import (
    MAX_MESSAGE_BYTES,
    MAX_STEP_TOKENS,
    FailedStep,
    StageMessage,
    encode_failed,
    encode_step,
    stage_reader,
)
from invoker.links.framing import HEADER_BYTES, FrameReader, LinkLost
from invoker.links.wire import StageWire
from registry.messages.sampling import Sampling
from tests.fixtures.fake_stage import FakeStage

ROWS = StageRows(FakeStage(2, 4, 6))  # rows of 8 bytes


def a_step(number: int, counts: list[int], closed: tuple[str, ...] = ()) -> StageStep:
    chunks = tuple(
        StageChunk(sequence=str(i), start=i, count=count, last=i % 2 == 0) for i, count in enumerate(counts)
    )
    sampling = Sampling(max_tokens=9, seed=number, stop_token_ids=(1, 2))
    opened = tuple(
        OpenSequence(
            sequence=chunk.sequence, max_tokens=50, sampling=sampling, call=f"call-{chunk.sequence}+1"
        )
        for chunk in chunks[:2]
    )
    return StageStep(number=number, closed=closed, opened=opened, chunks=chunks)


steps = st.builds(
    a_step,
    st.integers(0, 1 << 40),
    st.lists(st.integers(1, 40), max_size=6),
    st.lists(st.text(max_size=4), max_size=3).map(tuple),
)


def bytes_of_step(step: StageStep, rows_bytes: int) -> bytes:
    return bytes(encode_step(step, rows_bytes))


def bytes_of_failed(number: int, reason: str) -> bytes:
    return bytes(encode_failed(number, reason))


def framed(step: StageStep) -> bytes:
    rows = random.Random(step.number).randbytes(ROWS.nbytes(step))
    return bytes(encode_step(step, len(rows))) + rows


def read(
    reader: FrameReader[StageMessage], data: bytes, cuts: random.Random
) -> Iterator[tuple[object, bytes]]:
    while data:
        into = reader.buffer()
        count = min(len(into), len(data), cuts.choice([1, 7, 1000]))
        into[:count] = data[:count]
        data = data[count:]
        frame = reader.advance(count)
        while frame is not None:
            yield frame.message, bytes(frame.payload)
            frame = reader.advance(0)


@given(st.lists(st.one_of(steps, st.integers(0, 99)), max_size=5), st.randoms())
def test_frames_survive_the_wire_however_it_is_cut(sent: list[StageStep | int], cuts: random.Random) -> None:
    data = b"".join(bytes_of_failed(one, "why") if isinstance(one, int) else framed(one) for one in sent)
    wanted = [
        (FailedStep(one, "why"), b"") if isinstance(one, int) else (one, framed(one)[-ROWS.nbytes(one) :])
        for one in sent
    ]
    got = list(read(stage_reader(ROWS.nbytes), data, cuts))
    assert [said for said, _ in got] == [said for said, _ in wanted]
    for (said, rows), (_, expected) in zip(got, wanted, strict=True):
        if isinstance(said, StageStep) and said.chunks:
            assert rows == expected


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\n\r\n\r\n",
        struct.pack("<4sBxxxIQ", b"HCS1", 3, 10, 0),
        struct.pack("<4sBxxxIQ", b"HCS1", 1, 0, 0),
        struct.pack("<4sBxxxIQ", b"HCS1", 1, MAX_MESSAGE_BYTES + 1, 0),
        struct.pack("<4sBxxxIQ", b"HCS1", 1, 4, 0) + b"\xff\xff\xff\xff",
        bytes_of_step(a_step(1, [3]), 8),
        bytes_of_step(a_step(1, [3]), 1 << 60),
        bytes_of_step(a_step(1, [MAX_STEP_TOKENS, 1]), 8 * MAX_STEP_TOKENS + 8),
        bytes_of_step(a_step(1, [0]), 0),
        bytes_of_step(a_step(1, [-1]), 0),
        bytes_of_step(a_step(-1, [1]), 8),
    ],
    ids=range(11),
)
def test_what_is_no_frame_is_refused_before_memory_is_taken(bad: bytes) -> None:
    with pytest.raises(LinkLost):
        list(read(stage_reader(ROWS.nbytes), bad, random.Random(1)))


def test_damage_raises_nothing_else() -> None:
    random_ = random.Random(5)
    for _ in range(1000):
        raw = bytearray(framed(a_step(3, [2, 1, 4], ("a",))) + bytes_of_failed(4, "why"))
        for _ in range(random_.randint(1, 4)):
            raw[random_.randrange(len(raw))] = random_.randrange(256)
        try:
            list(read(stage_reader(ROWS.nbytes), bytes(raw), random_))
        except LinkLost:
            continue


@contextmanager
def wires() -> Iterator[tuple[StageWire[StageMessage], StageWire[StageMessage]]]:
    """Two stages, each the other's neighbour on both sides."""
    one, other = socket.socketpair(), socket.socketpair()
    first = StageWire(other[1], one[0], stage_reader(ROWS.nbytes))
    second = StageWire(one[1], other[0], stage_reader(ROWS.nbytes))
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def received(wire: StageWire[StageMessage], sender: StageWire[StageMessage]) -> tuple[object, torch.Tensor]:
    """Receive the next frame, from a sender with more data than the socket buffers."""
    while (frame := wire.receive()) is None:
        sender.wake()
        sender.wait()
    return frame.message, ROWS.stage_input(frame.message, frame.payload).data.clone()  # type: ignore[arg-type]


def test_rows_larger_than_the_sockets_buffers_come_whole_and_in_order() -> None:
    with wires() as (first, second):
        sent = []
        for number in range(3):
            step = a_step(number, [9000, 7000])
            rows = torch.arange(16_000, dtype=torch.float64).view(-1, 1) + number
            sent_rows = rows_as_bytes(rows)
            first.send((encode_step(step, len(sent_rows))), sent_rows)
            sent.append((step, rows))
        for step, rows in sent:
            said, data = received(second, first)
            assert said == step and torch.equal(data, rows)
        assert repr(first) == "<StageWire 0 bytes to send>"


def test_frames_that_come_together_are_taken_one_by_one() -> None:
    with wires() as (first, second):
        sent = [a_step(number, [1] * number) for number in range(1, 4)]
        for step in sent:
            rows = torch.full((step.number, 1), float(step.number), dtype=torch.float64)
            parts = ((encode_step(step, rows.nbytes)), rows_as_bytes(rows))
            first.send(*parts)
        for step in sent:
            said, data = received(second, first)
            assert said == step and data.tolist() == [[step.number]] * step.number
        assert second.receive() is None


def test_a_neighbour_that_leaves_is_noticed_on_both_sides() -> None:
    with wires() as (first, second):
        first.close()
        with pytest.raises(LinkLost, match="previous"):
            second.receive()
        with pytest.raises(LinkLost):
            second.wait()


def test_a_wire_that_waits_is_woken() -> None:
    with wires() as (first, _):
        first.wake()
        first.wait()
        assert first.receive() is None
        first.close()
        first.wake()  # of no use any more, and no error


def test_header_is_as_long_as_it_says() -> None:
    assert len(bytes_of_failed(1, "")) - len(bytes_of_failed(1, "x" * 5)) == -5
    assert struct.calcsize("<4sBxxxIQ") == HEADER_BYTES
