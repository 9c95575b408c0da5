"""The threads of stages: what they have made leaves while they work on, and they always end."""

import asyncio
import socket

import pytest
import torch

from invoker.engine.runner import UNBILLED, NullMeter
from invoker.engine.stage_contract import (
    OpenSequence,
    StageChunk,
    StageInput,
    StageOutput,
    StageStep,
    rows_as_bytes,
)
from invoker.engine.stage_rows import StageRows
from invoker.links.frames import StageMessage, encode_step, stage_reader
from invoker.links.framing import FrameReader, LinkFrame, MessageT
from invoker.pipeline.metered import MeteredStage, StepCalls
from invoker.pipeline.stage_thread import WireThread
from invoker.pipeline.worker import StageWorker
from invoker.prefill.frames import (
    PairMessage,
    PromptDrop,
    PromptHandover,
    PromptOffer,
    PromptRequest,
    encode,
    pair_reader,
)
from invoker.prefill.layers import CHUNK_TOKENS
from invoker.prefill.target import TargetWorker
from registry.messages.sampling import Sampling
from tests.fixtures.fake_engine import StepGate
from tests.fixtures.fake_stage import FakeStage
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.zigzag import Counter

TOKENS = 8_000  # whose rows are more than the buffers of small sockets, and not of others
_SMALL = 4096


class GatedStage(FakeStage):
    """Each step that runs something waits to be let through, and is counted before."""

    def __init__(self, first: int, last: int, layers: int, gate: StepGate, started: Counter) -> None:
        super().__init__(first, last, layers, pages=1 << 20)
        self._gate = gate
        self._started = started

    def run(self, given: StageInput) -> StageOutput:
        if given.step.chunks:
            self._started.add(1)
            self._gate.wait()
        return super().run(given)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return a socket pair; the first one, the thread's, has a small send buffer."""
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL)
    other.setblocking(False)
    return one, other


def prompt(number: int) -> StageStep:
    name = str(number)
    return StageStep(
        number=number,
        closed=(),
        opened=(OpenSequence(sequence=name, max_tokens=TOKENS, sampling=Sampling(max_tokens=1)),),
        chunks=(StageChunk(sequence=name, start=0, count=TOKENS, last=True),),
    )


def step_frame(step: StageStep) -> bytes:
    rows = rows_as_bytes(torch.full((step.tokens, 1), 5.0, dtype=torch.float64))
    return bytes(encode_step(step, len(rows))) + rows


async def next_of(link: socket.socket, reader: FrameReader[MessageT]) -> LinkFrame[MessageT]:
    loop = asyncio.get_running_loop()
    frame = reader.advance(0)
    while frame is None:
        count = await loop.sock_recv_into(link, reader.buffer())
        assert count, "the thread has closed its link"
        frame = reader.advance(count)
    return frame


async def test_rows_leave_while_the_next_step_is_run() -> None:
    gate = StepGate()
    (before, sends), (behind, reads) = pair(), pair()
    stage = MeteredStage(GatedStage(1, 2, 3, gate, Counter()), NullMeter(), lambda _: UNBILLED)
    worker = StageWorker(stage, before, behind, name="stage")
    reader = stage_reader(StageRows(FakeStage(2, 3, 3)).nbytes)
    try:
        async with asyncio.timeout(PATIENCE_S):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sends, step_frame(prompt(0)))
            await loop.sock_sendall(sends, step_frame(prompt(1)))
            gate.release()
            frame = await next_of(reads, reader)  # though the next step stands still
            assert frame.message == prompt(0)
            gate.open()
            frame = await next_of(reads, reader)
            assert frame.message == prompt(1)
    finally:
        gate.open()
        await worker.aclose()
        sends.close()
        reads.close()


async def test_a_stage_gives_what_it_has_before_the_step_that_closes_it() -> None:
    given: list[tuple[str, int]] = []
    stage = MeteredStage(
        FakeStage(1, 2, 3, pages=1 << 20),
        NullMeter(),
        lambda _: UNBILLED,
        export=lambda sequence, one: given.append((sequence, one.tokens)),
    )
    first = prompt(0)
    rows = torch.full((first.tokens, 1), 5.0, dtype=torch.float64)
    await asyncio.to_thread(stage.run, StageInput(step=first, data=rows))
    (name,) = [one.sequence for one in first.opened]
    stage.export("another")
    assert given == []
    stage.export(name)
    stage.export(name)
    last = StageStep(number=1, closed=(name,), opened=(), chunks=(), exported=(name,))
    stage.run(StageInput(step=last, data=rows[:0]))
    assert given == [(name, TOKENS)]


async def test_a_stage_gives_no_part_of_a_prompt_whose_rest_is_on_its_way() -> None:
    given: list[tuple[str, int]] = []
    stage = MeteredStage(
        FakeStage(1, 2, 3, pages=1 << 20),
        NullMeter(),
        lambda _: UNBILLED,
        export=lambda sequence, one: given.append((sequence, one.tokens)),
    )
    rows = torch.full((TOKENS, 1), 5.0, dtype=torch.float64)
    half = TOKENS // 2
    some = StageChunk(sequence="0", start=0, count=half, last=False)
    begins = StageStep(number=0, closed=(), opened=prompt(0).opened, chunks=(some,))
    rest = StageChunk(sequence="0", start=half, count=TOKENS - half, last=True)
    ends = StageStep(number=1, closed=(), opened=(), chunks=(rest,))
    last = StageStep(number=2, closed=("0",), opened=(), chunks=(), exported=("0",))
    await asyncio.to_thread(stage.run, StageInput(step=begins, data=rows[:half]))
    stage.export("0")
    assert given == []
    await asyncio.to_thread(stage.run, StageInput(step=ends, data=rows[half:]))
    stage.run(StageInput(step=last, data=rows[:0]))
    assert given == [("0", TOKENS)]


class TargetAtWork:
    """The target of a pair, which has one of three layers; the gate holds its steps."""

    def __init__(self) -> None:
        self.gate, self.started = StepGate(), Counter()
        (before, self.sends), (behind, self.reads) = pair(), pair()
        self._reader = pair_reader()
        calls = StepCalls(NullMeter(), lambda _: UNBILLED)
        self.worker = TargetWorker(3, calls, before, behind, name="target")
        self.worker.add_layer(GatedStage(0, 1, 3, self.gate, self.started))

    async def __aenter__(self) -> "TargetAtWork":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gate.open()
        await self.worker.aclose()
        self.sends.close()
        self.reads.close()

    async def say(self, *said: PairMessage) -> None:
        for one in said:
            ids = bytes(8 * one.tokens) if isinstance(one, PromptOffer) else b""
            await asyncio.get_running_loop().sock_sendall(self.sends, bytes(encode(one)) + ids)

    async def given(self) -> PromptHandover:
        frame = await next_of(self.reads, self._reader)
        assert isinstance(frame.message, PromptHandover)
        return frame.message


async def test_a_prompt_leaves_while_others_wait_for_their_layers() -> None:
    async with asyncio.timeout(PATIENCE_S), TargetAtWork() as target:
        parts = -(-TOKENS // CHUNK_TOKENS)
        await target.say(PromptOffer("1", "c1", TOKENS), PromptOffer("2", "c2", TOKENS))
        target.gate.release(parts)
        await target.started.reaches(parts + 1)
        await target.say(PromptRequest())
        target.gate.release()
        given = await target.given()  # though the next part stands still
        assert (given.name, given.layers) == ("1", 1)
        assert given.hidden_bytes == 8 * TOKENS == given.kv_bytes


async def test_who_asked_for_a_prompt_that_it_then_drops_is_answered() -> None:
    async with asyncio.timeout(PATIENCE_S), TargetAtWork() as target:
        await target.say(PromptOffer("1", "c1", TOKENS))
        await target.started.reaches(1)
        await target.say(PromptRequest(), PromptDrop("1"))
        target.gate.open()
        assert (await target.given()).name == ""


class Forgetful(WireThread[StageMessage]):
    """A thread that cannot let go of what it has."""

    def _on_end(self) -> None:
        raise RuntimeError("what it has is stuck")


async def test_a_thread_that_cannot_let_go_ends_nevertheless(caplog: pytest.LogCaptureFixture) -> None:
    (before, sends), (behind, reads) = pair(), pair()
    thread = Forgetful(before, behind, stage_reader(StageRows(FakeStage(1, 2, 3)).nbytes), name="stuck")
    thread.start()
    with sends, reads:
        async with asyncio.timeout(PATIENCE_S):
            await thread.aclose()
    assert "what it has is stuck" in caplog.text
