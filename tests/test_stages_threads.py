"""The threads of stages: they answer what they were asked, and always end."""

import asyncio
import socket

import pytest

from invoker.engine.fake import StepGate
from invoker.engine.fake_stage import FakeStage
from invoker.engine.runner import NOBODY, NoMeter
from invoker.engine.stage_contract import StageInput, StageOutput
from invoker.engine.stage_rows import RowsOf
from invoker.stages.frames import Frame, FrameReader
from invoker.stages.metered import StepCalls
from invoker.stages.stage_thread import WireThread
from invoker.stages.zigzag_frames import Drop, Given, Offer, PairFrame, PairReader, Said, Take, pack
from invoker.stages.zigzag_target import TargetWorker
from tests.patience import PATIENCE_S
from tests.zigzag_fixture import Counter

TOKENS = 8_000  # several parts


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
    """The first one is the thread's."""
    one, other = socket.socketpair()
    other.setblocking(False)
    return one, other


async def next_of(link: socket.socket, reader: PairReader) -> PairFrame:
    loop = asyncio.get_running_loop()
    while True:
        count = await loop.sock_recv_into(link, reader.buffer())
        assert count, "the thread has closed its link"
        frame = reader.advance(count)
        if frame is not None:
            return frame


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
        said = (await next_of(self.reads, self._reader)).said
        assert isinstance(said, Given)
        return said


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
