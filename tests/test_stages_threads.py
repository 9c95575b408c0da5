"""The threads of stages: what they have made leaves while they work on, and they always end."""

import asyncio
import socket

import pytest
import torch

from invoker.engine.fake import StepGate
from invoker.engine.fake_stage import FakeStage
from invoker.engine.runner import NOBODY, NoMeter
from invoker.engine.stage_contract import (
    Opening,
    StageChunk,
    StageInput,
    StageOutput,
    StageStep,
    rows_as_bytes,
)
from invoker.engine.stage_rows import RowsOf
from invoker.stages.frames import Frame, FrameReader, pack_step
from invoker.stages.metered import MeteredStage, StepCalls
from invoker.stages.stage_thread import WireThread
from invoker.stages.worker import StageWorker
from invoker.stages.zigzag_frames import Drop, Given, Offer, PairFrame, PairReader, Said, Take, pack
from invoker.stages.zigzag_layers import CHUNK_TOKENS
from invoker.stages.zigzag_target import TargetWorker
from registry.messages import Sampling
from tests.patience import PATIENCE_S
from tests.zigzag_fixture import Counter

TOKENS = 8_000  # whose rows are more than the buffers of small sockets, and not of others
_SMALL = 4096


class GatedStage(FakeStage):
    """Each step that runs something waits to be let through, and is counted before."""

    def __init__(self, first: int, last: int, layers: int, gate: StepGate, begun: Counter) -> None:
        super().__init__(first, last, layers, pages=1 << 20)
        self._gate = gate
        self._begun = begun

    def run(self, given: StageInput) -> StageOutput:
        if given.step.chunks:
            self._begun.add(1)
            self._gate.wait()
        return super().run(given)


def pair() -> tuple[socket.socket, socket.socket]:
    """The first one is the thread's, which takes little to send."""
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL)
    other.setblocking(False)
    return one, other


def prompt(number: int) -> StageStep:
    name = str(number)
    return StageStep(
        number=number,
        closed=(),
        opened=(Opening(sequence=name, most=TOKENS, sampling=Sampling(max_tokens=1)),),
        chunks=(StageChunk(sequence=name, start=0, count=TOKENS, last=True),),
    )


def step_frame(step: StageStep) -> bytes:
    rows = rows_as_bytes(torch.full((step.tokens, 1), 5.0, dtype=torch.float64))
    return pack_step(step, len(rows)) + rows


async def next_of(link: socket.socket, reader: FrameReader | PairReader) -> Frame | PairFrame:
    loop = asyncio.get_running_loop()
    frame: Frame | PairFrame | None = reader.advance(0)
    while frame is None:
        count = await loop.sock_recv_into(link, reader.buffer())
        assert count, "the thread has closed its link"
        frame = reader.advance(count)
    return frame


def test_rows_leave_while_the_next_step_is_run() -> None:
    async def main() -> None:
        gate = StepGate()
        (before, sends), (behind, reads) = pair(), pair()
        stage = MeteredStage(GatedStage(1, 2, 3, gate, Counter()), NoMeter(), lambda _: NOBODY)
        worker = StageWorker(stage, before, behind, name="stage")
        reader = FrameReader(RowsOf(FakeStage(2, 3, 3)).nbytes)
        try:
            async with asyncio.timeout(PATIENCE_S):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(sends, step_frame(prompt(0)))
                await loop.sock_sendall(sends, step_frame(prompt(1)))
                gate.release()
                frame = await next_of(reads, reader)  # though the next step stands still
                assert isinstance(frame, Frame) and frame.said == prompt(0)
                gate.open()
                frame = await next_of(reads, reader)
                assert isinstance(frame, Frame) and frame.said == prompt(1)
        finally:
            gate.open()
            await worker.aclose()
            sends.close()
            reads.close()

    asyncio.run(main())


def test_a_stage_gives_what_it_has_before_the_step_that_closes_it() -> None:
    async def main() -> None:
        given: list[tuple[str, int]] = []
        stage = MeteredStage(
            FakeStage(1, 2, 3, pages=1 << 20),
            NoMeter(),
            lambda _: NOBODY,
            aside=lambda sequence, one: given.append((sequence, one.tokens)),
        )
        first = prompt(0)
        rows = torch.full((first.tokens, 1), 5.0, dtype=torch.float64)
        await asyncio.to_thread(stage.run, StageInput(step=first, data=rows))
        (name,) = [one.sequence for one in first.opened]
        stage.give("another")
        assert given == []
        stage.give(name)
        stage.give(name)
        last = StageStep(number=1, closed=(name,), opened=(), chunks=(), kept=(name,))
        stage.run(StageInput(step=last, data=rows[:0]))
        assert given == [(name, TOKENS)]

    asyncio.run(main())


def test_a_stage_gives_no_part_of_a_prompt_whose_rest_is_on_its_way() -> None:
    async def main() -> None:
        given: list[tuple[str, int]] = []
        stage = MeteredStage(
            FakeStage(1, 2, 3, pages=1 << 20),
            NoMeter(),
            lambda _: NOBODY,
            aside=lambda sequence, one: given.append((sequence, one.tokens)),
        )
        rows = torch.full((TOKENS, 1), 5.0, dtype=torch.float64)
        half = TOKENS // 2
        some = StageChunk(sequence="0", start=0, count=half, last=False)
        begins = StageStep(number=0, closed=(), opened=prompt(0).opened, chunks=(some,))
        rest = StageChunk(sequence="0", start=half, count=TOKENS - half, last=True)
        ends = StageStep(number=1, closed=(), opened=(), chunks=(rest,))
        last = StageStep(number=2, closed=("0",), opened=(), chunks=(), kept=("0",))
        await asyncio.to_thread(stage.run, StageInput(step=begins, data=rows[:half]))
        stage.give("0")
        assert given == []
        await asyncio.to_thread(stage.run, StageInput(step=ends, data=rows[half:]))
        stage.run(StageInput(step=last, data=rows[:0]))
        assert given == [("0", TOKENS)]

    asyncio.run(main())


class TargetAtWork:
    """The target of a pair, which has one of three layers; the gate holds its steps."""

    def __init__(self) -> None:
        self.gate, self.begun = StepGate(), Counter()
        (before, self.sends), (behind, self.reads) = pair(), pair()
        self._reader = PairReader()
        calls = StepCalls(NoMeter(), lambda _: NOBODY)
        self.worker = TargetWorker(3, calls, before, behind, name="target")
        self.worker.grow(GatedStage(0, 1, 3, self.gate, self.begun))

    async def __aenter__(self) -> "TargetAtWork":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gate.open()
        await self.worker.aclose()
        self.sends.close()
        self.reads.close()

    async def say(self, *said: Said) -> None:
        for one in said:
            ids = bytes(8 * one.tokens) if isinstance(one, Offer) else b""
            await asyncio.get_running_loop().sock_sendall(self.sends, bytes(pack(one)) + ids)

    async def given(self) -> Given:
        frame = await next_of(self.reads, self._reader)
        assert isinstance(frame, PairFrame) and isinstance(frame.said, Given)
        return frame.said


def test_a_prompt_leaves_while_others_wait_for_their_layers() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), TargetAtWork() as target:
            parts = -(-TOKENS // CHUNK_TOKENS)
            await target.say(Offer("1", "c1", TOKENS), Offer("2", "c2", TOKENS))
            target.gate.release(parts)
            await target.begun.reaches(parts + 1)
            await target.say(Take())
            target.gate.release()
            given = await target.given()  # though the next part stands still
            assert (given.name, given.layers) == ("1", 1)
            assert given.hidden_bytes == 8 * TOKENS == given.kv_bytes

    asyncio.run(main())


def test_who_asked_for_a_prompt_that_it_then_drops_is_answered() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), TargetAtWork() as target:
            await target.say(Offer("1", "c1", TOKENS))
            await target.begun.reaches(1)
            await target.say(Take(), Drop("1"))
            target.gate.open()
            assert (await target.given()).name == ""

    asyncio.run(main())


class Forgetful(WireThread[Frame]):
    """A thread that cannot let go of what it has."""

    def _on_end(self) -> None:
        raise RuntimeError("what it has is stuck")


def test_a_thread_that_cannot_let_go_ends_nevertheless(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        (before, sends), (behind, reads) = pair(), pair()
        thread = Forgetful(before, behind, FrameReader(RowsOf(FakeStage(1, 2, 3)).nbytes), name="stuck")
        thread.start()
        with sends, reads:
            async with asyncio.timeout(PATIENCE_S):
                await thread.aclose()

    asyncio.run(main())
    assert "what it has is stuck" in caplog.text
