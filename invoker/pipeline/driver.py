"""A pipeline at work, on the node with the head: calls in, steps around the stages, tokens out."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Iterable
from functools import partial

from invoker.engine.conductor import Conductor
from invoker.engine.contract import EngineCall, EngineError, NewSequence, TokenOutput
from invoker.engine.output_stream import OutputStream
from invoker.engine.stage_contract import StageInput, StageOutput
from invoker.errors import NoSuchPipeline
from invoker.stages.frames import FailedStep, Frame
from invoker.stages.metered import MeteredStage
from invoker.stages.stage_thread import StageThread
from registry.live_messages import MOVED

log = logging.getLogger("invoker.stages")


class PipelineDriver(StageThread):
    """Owns the conductor too, which is the thread's alone as well.

    The stage is the last one, or with a tied head the first: what it has the `head` of. `before` brings what
    the last of the others made, `behind` leads to the first of them. Streams end when they are done or
    moved; if the driver ends by itself (see `failure`), they wait for `end` to say why.
    """

    def __init__(
        self,
        stage: MeteredStage,
        conductor: Conductor,
        before: socket.socket,
        behind: socket.socket,
        *,
        name: str,
    ) -> None:
        self._begins = stage.stage.layers[0] == 0  # a tied head: what the others made is finished here
        super().__init__(stage, before, behind, name=name, finishes=self._begins)
        self._conductor = conductor
        self._live: dict[str, OutputStream] = {}  # the thread's
        self._streams: set[OutputStream] = set()  # the loop's
        self._refusal: Exception | None = None  # the loop's: why nothing new is taken
        self._retiring = False  # the thread's
        self._retired = asyncio.Event()
        self.start()

    def __repr__(self) -> str:
        state = "ended" if self._closed.is_set() else "at work"
        return f"<PipelineDriver {state}, {len(self._streams)} streams>"

    @property
    def streams(self) -> int:
        """How many are under way."""
        return len(self._streams)

    async def generate(self, sequence: NewSequence, call: EngineCall) -> AsyncGenerator[TokenOutput, None]:
        """As EngineRunner.generate; one that is moved ends with the finish reason MOVED, and no token.

        The call is metered by the stages, which know it by the request's id.
        """
        if self._refusal is not None:
            raise self._refusal
        stream = OutputStream(sequence)
        self._streams.add(stream)
        self._submit(partial(self._add, stream))
        try:
            while not stream.ended:
                yield await stream.next()
        finally:
            self._streams.discard(stream)
            if not stream.ended:
                self._submit(partial(self._cancel, stream))

    def leave(self, request_ids: Iterable[str] = (), *, keeping: bool = True) -> None:
        """Move these calls; if none are named, all, and nothing new is taken. Stages put aside what they have
        of them, unless not `keeping`."""
        wanted = frozenset(request_ids)
        if not wanted:
            self._refusal = NoSuchPipeline("the pipeline ends")
        self._submit(partial(self._move, wanted, keeping))

    async def retire(self, within_s: float) -> None:
        """Move all calls, and return once the stages have put aside what these leave there, or it takes too
        long."""
        self.leave()
        self._submit(self._retire)
        waits = [asyncio.create_task(one.wait()) for one in (self._retired, self._closed)]
        try:
            await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def aclose(self) -> None:
        """Move all calls, and free what it has after the step under way. Idempotent."""
        self.leave()
        await super().aclose()

    def end(self, reason: Exception) -> None:
        """It has ended by itself, and this is why: so do the streams."""
        self._refusal = reason
        for stream in self._streams:
            stream.outputs.put_nowait(reason)

    # The loop's side.

    def _deliver(self, outputs: list[tuple[OutputStream, TokenOutput | Exception]]) -> None:
        for stream, output in outputs:
            stream.outputs.put_nowait(output)

    # The thread's side.

    def _on_idle(self) -> bool:
        if self._wire.is_sending:  # or the end of a step's rows would wait for the next one
            return False
        given = self._conductor.next_step()
        if given is not None:
            self._begin(given)
        elif self._retiring and not self._conductor.has_work:
            self._retiring = False
            self._call_loop(self._retired.set)
        return given is not None

    def _begin(self, given: StageInput) -> None:
        """Send a step on its way."""
        if not self._begins:
            self._send(StageOutput(step=given.step, hidden=given.data))
            return
        try:
            output = self._stage.run(given)
        except EngineError as error:
            self._tell(self._conductor.fail(given.step.number, str(error)))
        else:
            self._send(output)

    def _on_frame(self, frame: Frame) -> None:
        """A step comes back from the others."""
        outputs = self._came_back(frame)
        if not self._begins:  # else what has come, and the streams, would keep the first stage waiting
            self._on_idle()
        self._tell(outputs)

    def _came_back(self, frame: Frame) -> list[TokenOutput]:
        """What is to be told of a step."""
        said = frame.said
        if isinstance(said, FailedStep):
            return self._conductor.fail(said.number, said.reason)
        given = self._rows.given(said, frame.rows)
        try:
            output = self._stage.finish(given) if self._begins else self._stage.run(given)
        except EngineError as error:
            return self._conductor.fail(said.number, str(error))
        return self._conductor.take(output)

    def _tell(self, outputs: list[TokenOutput]) -> None:
        told: list[tuple[OutputStream, TokenOutput | Exception]] = []
        for output in outputs:
            stream = self._live[output.request_id]
            if output.finish_reason or output.error:
                del self._live[output.request_id]
            told.append((stream, output))
        self._post(told)

    def _add(self, stream: OutputStream) -> None:
        request_id = stream.sequence.request_id
        try:
            if request_id in self._live:
                raise EngineError(f"sequence {request_id} is running already")
            self._conductor.add(stream.sequence)
        except EngineError as error:
            self._post([(stream, error)])
        else:
            self._live[request_id] = stream

    def _cancel(self, stream: OutputStream) -> None:
        request_id = stream.sequence.request_id
        if self._live.get(request_id) is stream:
            del self._live[request_id]
            self._conductor.cancel(request_id)

    def _move(self, wanted: frozenset[str], keeping: bool) -> None:
        told: list[tuple[OutputStream, TokenOutput | Exception]] = []
        for request_id in [one for one in self._live if not wanted or one in wanted]:
            aside = self._conductor.move(request_id) if keeping else ""
            self._conductor.cancel(request_id)
            told.append((self._live.pop(request_id), moved_output(request_id, aside)))
        self._post(told)

    def _retire(self) -> None:
        self._retiring = True

    def _post(self, outputs: list[tuple[OutputStream, TokenOutput | Exception]]) -> None:
        if outputs:
            self._call_loop(self._deliver, outputs)


def moved_output(request_id: str, aside: str = "") -> TokenOutput:
    """The last output of a call that moves; `aside` is what the stages put its K and V aside as."""
    return TokenOutput(
        request_id=request_id, token_id=None, logprob=None, finish_reason=MOVED, work=0, aside=aside
    )
