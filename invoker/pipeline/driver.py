"""Runs a pipeline on the node with the last stage: schedules steps and streams tokens."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Iterable
from functools import partial

from invoker.base.errors import NoSuchPipeline
from invoker.engine.contract import EngineCall, EngineError, NewSequence, TokenOutput
from invoker.engine.output_stream import OutputStream
from invoker.engine.scheduling.pipeline_scheduler import PipelineScheduler
from invoker.engine.stage_contract import StageInput, StageOutput
from invoker.links.frames import FailedStep, StageMessage
from invoker.links.framing import LinkFrame
from invoker.pipeline.metered import MeteredStage
from invoker.pipeline.stage_thread import StageThread
from registry.messages.live import MOVED

log = logging.getLogger("invoker.stages")


class PipelineDriver(StageThread):
    """Runs requests through a pipeline; its thread owns the stage and the scheduler.

    The stage has the LM head: the last one, or with tied embeddings the first. `before` is the link from the
    last of the other stages, `behind` the link to the first of them. Streams end when finished or moved; if
    the driver fails (see `failure`), they wait for `fail` to give the reason.
    """

    def __init__(
        self,
        stage: MeteredStage,
        scheduler: PipelineScheduler,
        before: socket.socket,
        behind: socket.socket,
        *,
        name: str,
    ) -> None:
        self._is_first = stage.stage.layers[0] == 0  # tied embeddings: steps start and finish here
        super().__init__(stage, before, behind, name=name, finishes=self._is_first)
        self._scheduler = scheduler
        self._live: dict[str, OutputStream] = {}  # the thread's
        self._streams: set[OutputStream] = set()  # the loop's
        self._refusal: Exception | None = None  # the loop's: why new requests are refused
        self._retiring = False  # the thread's
        self._retired = asyncio.Event()
        self.start()

    def __repr__(self) -> str:
        state = "ended" if self._closed.is_set() else "running"
        return f"<PipelineDriver {state}, {len(self._streams)} streams>"

    @property
    def streams(self) -> int:
        """Return the number of running streams."""
        return len(self._streams)

    async def generate(self, sequence: NewSequence, call: EngineCall) -> AsyncGenerator[TokenOutput, None]:
        """Run a request as EngineRunner.generate does; a moved one ends with finish reason MOVED, no token.

        The stages meter the call by the request's id.
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

    def move(self, request_ids: Iterable[str] = (), *, export_kv: bool = True) -> None:
        """Move these requests; if none are named, move all and refuse new ones.

        Stages export their K and V if `export_kv`.
        """
        wanted = frozenset(request_ids)
        if not wanted:
            self._refusal = NoSuchPipeline("the pipeline ends")
        self._submit(partial(self._move, wanted, export_kv))

    async def retire(self, timeout_s: float) -> None:
        """Move all requests, and return once the stages have exported their K and V, or after `timeout_s`."""
        self.move()
        self._submit(self._start_retiring)
        waits = [asyncio.create_task(one.wait()) for one in (self._retired, self._closed)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def aclose(self) -> None:
        """Move all requests, and free the stage after the current step. Idempotent."""
        self.move()
        await super().aclose()

    def fail(self, reason: Exception) -> None:
        """End all streams with `reason`, after the driver has failed."""
        self._refusal = reason
        for stream in self._streams:
            stream.outputs.put_nowait(reason)

    # On the event loop.

    def _deliver(self, outputs: list[tuple[OutputStream, TokenOutput | Exception]]) -> None:
        for stream, output in outputs:
            stream.outputs.put_nowait(output)

    # On the thread.

    def _on_idle(self) -> bool:
        if self._wire.is_sending:  # finish sending the previous step's rows first
            return False
        inputs = self._scheduler.next_step()
        if inputs is not None:
            self._start_step(inputs)
        elif self._retiring and not self._scheduler.has_work:
            self._retiring = False
            self._call_loop(self._retired.set)
        return inputs is not None

    def _start_step(self, inputs: StageInput) -> None:
        if not self._is_first:
            self._send(StageOutput(step=inputs.step, hidden=inputs.data))
            return
        try:
            output = self._stage.run(inputs)
        except EngineError as error:
            self._publish(self._scheduler.fail_step(inputs.step.number, str(error)))
        else:
            self._send(output)

    def _on_frame(self, frame: LinkFrame[StageMessage]) -> None:
        """Complete a step that has passed the other stages."""
        outputs = self._complete(frame)
        if not self._is_first:  # start the next step before publishing, so that the first stage does not wait
            self._on_idle()
        self._publish(outputs)

    def _complete(self, frame: LinkFrame[StageMessage]) -> list[TokenOutput]:
        message = frame.message
        if isinstance(message, FailedStep):
            return self._scheduler.fail_step(message.number, message.reason)
        inputs = self._rows.stage_input(message, frame.payload)
        try:
            output = self._stage.finish(inputs) if self._is_first else self._stage.run(inputs)
        except EngineError as error:
            return self._scheduler.fail_step(message.number, str(error))
        return self._scheduler.complete_step(output)

    def _publish(self, outputs: list[TokenOutput]) -> None:
        published: list[tuple[OutputStream, TokenOutput | Exception]] = []
        for output in outputs:
            stream = self._live[output.request_id]
            if output.finish_reason or output.error:
                del self._live[output.request_id]
            published.append((stream, output))
        self._post(published)

    def _add(self, stream: OutputStream) -> None:
        request_id = stream.sequence.request_id
        try:
            if request_id in self._live:
                raise EngineError(f"sequence {request_id} is already running")
            self._scheduler.add(stream.sequence)
        except EngineError as error:
            self._post([(stream, error)])
        else:
            self._live[request_id] = stream

    def _cancel(self, stream: OutputStream) -> None:
        request_id = stream.sequence.request_id
        if self._live.get(request_id) is stream:
            del self._live[request_id]
            self._scheduler.cancel(request_id)

    def _move(self, wanted: frozenset[str], export_kv: bool) -> None:
        published: list[tuple[OutputStream, TokenOutput | Exception]] = []
        for request_id in [one for one in self._live if not wanted or one in wanted]:
            exported_kv = self._scheduler.move(request_id) if export_kv else ""
            self._scheduler.cancel(request_id)
            published.append((self._live.pop(request_id), moved_output(request_id, exported_kv)))
        self._post(published)

    def _start_retiring(self) -> None:
        self._retiring = True

    def _post(self, outputs: list[tuple[OutputStream, TokenOutput | Exception]]) -> None:
        if outputs:
            self._call_loop(self._deliver, outputs)


def moved_output(request_id: str, exported_kv: str = "") -> TokenOutput:
    """Return the last output of a moved request; `exported_kv` is the name of its exported K and V."""
    return TokenOutput(
        request_id=request_id,
        token_id=None,
        logprob=None,
        finish_reason=MOVED,
        work=0,
        exported_kv=exported_kv,
    )
