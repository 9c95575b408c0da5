"""The asyncio side of an engine: the thread that owns it, and the streams that the loop reads."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from invoker.engine.contract import (
    ComputeEngine,
    EngineCall,
    EngineError,
    GenerateEngine,
    NewSequence,
    StepMeter,
    TokenOutput,
)
from invoker.engine.engine_load import EngineLoad
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.entry import EntryFormat, LayerEntry
from invoker.engine.kv.export import ExportKv, KvExport
from invoker.engine.kv.slices import KvSlice, in_host_memory
from invoker.engine.output_stream import OutputStream
from invoker.engine.scheduling.sequence_table import InvalidSequence
from registry.messages.live import MOVED

logger = logging.getLogger(__name__)


class EngineClosed(EngineError):
    """The runner is closed, or its engine failed for good: another instance can continue the work."""

    code = "draining"


class KvReceiver(Protocol):
    """A GenerateEngine that can import K and V, and prompts of which the first layers ran elsewhere."""

    def add(self, sequence: NewSequence, kv: Sequence[KvSlice], entry: LayerEntry | None) -> None:
        """See DecoderEngine.add."""
        ...


class UnbilledCall:
    """The EngineCall of work that is not billed."""

    def hold(self) -> None:
        return None

    def release(self) -> None:
        return None


class NullMeter:
    """A StepMeter that records nothing."""

    def start_step(self) -> None:
        return None

    def end_step(self, work: Sequence[tuple[EngineCall, int]]) -> None:
        return None


UNBILLED = UnbilledCall()


class KvExporter(Protocol):
    """A GenerateEngine that can export K and V, also while it runs a prompt."""

    def export(self, request_id: str, started: Callable[[KvExport], None]) -> None:
        """See BatchedEngine."""
        ...

    def finish_export(self, request_id: str) -> None:
        """See BatchedEngine."""
        ...

    def export_kv(self, request_id: str) -> KvSlice:
        """See BatchedEngine."""
        ...


class _Stream(OutputStream):
    def __init__(
        self,
        sequence: NewSequence,
        call: EngineCall,
        kv: Sequence[KvSlice],
        export: ExportKv | None,
        entry: LayerEntry | None,
    ) -> None:
        super().__init__(sequence)
        self.call = call
        self.kv, self.entry = kv, entry  # until the engine has them
        self.export = export


class EngineRunner:
    """Owns `engine` and the only thread that uses it. Created inside a running event loop.

    The thread sleeps on a condition while there is nothing to do. Commands (add, cancel, compute) run between
    steps, and the outputs of a step reach the loop in one call. The `meter` is called around each step and
    forward; a call is held while the engine may run something for it, which is longer than its stream is read
    if the reader leaves in the middle of a step. If the engine raises from a step, which it never does for a
    fault of one step alone, all its streams end with EngineClosed and the runner closes itself: see
    `failure`.
    """

    def __init__(
        self,
        engine: GenerateEngine | ComputeEngine,
        *,
        name: str = "engine",
        meter: StepMeter | None = None,
        stepped: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._stepped = stepped  # called on the loop after steps
        self._meter = meter or NullMeter()
        self._generator = cast(GenerateEngine, engine) if hasattr(engine, "step") else None
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()  # guarded by the condition
        self._closing = False  # guarded by the condition
        self._live: dict[str, _Stream] = {}  # the thread's: what the engine holds
        self._streams: set[_Stream] = set()  # the loop's
        self._calls: set[asyncio.Future[dict[str, np.ndarray]]] = set()  # the loop's
        self._hand_offs: set[asyncio.Future[None]] = set()  # the loop's: set once their sequences have left
        self._held: dict[object, EngineCall] = {}  # the loop's: by stream or forward
        self._closed = asyncio.Event()
        self.load = None if self._generator is None else EngineLoad()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "failed" if self.failure else "closed" if self._closing else "open"
        return f"<EngineRunner {state}, {len(self._streams)} streams, {len(self._calls)} calls>"

    @property
    def kv_shape(self) -> KvShape | None:
        """The shape of K and V that `generate` accepts; None if it accepts none."""
        found = getattr(self._engine, "kv_shape", None)
        return found if isinstance(found, KvShape) else None

    @property
    def entry_format(self) -> EntryFormat | None:
        """The format of the entries that `generate` accepts; None if it accepts none."""
        found = getattr(self._engine, "entry_format", None)
        return found if isinstance(found, EntryFormat) else None

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """The tokens of KV cache in use, and in all; zeros if unknown."""
        used, total = getattr(self._engine, "kv_tokens", (0, 0))
        return used, total

    async def generate(
        self,
        sequence: NewSequence,
        call: EngineCall = UNBILLED,
        kv: Sequence[KvSlice] = (),
        export: ExportKv | None = None,
        entry: LayerEntry | None = None,
    ) -> AsyncGenerator[TokenOutput, None]:
        """Yield a sequence's outputs up to the one with a `finish_reason` or an `error`.

        `kv` is K and V of its first tokens in all layers: only the tokens after them are run (see
        DecoderEngine.add); with `entry` its tokens skip the layers that ran elsewhere. Where these do not fit
        the model, all tokens are run through all layers. With `export` a sequence that
        does not end with its first token is handed off after it: that output has the finish reason MOVED.
        `exported_kv` is the name under which its K and V are exported: of an output without a token before
        its prompt runs, and of the last one if all were. Closing the generator early
        (see contextlib.aclosing) or cancelling its task cancels the sequence before the engine's next step.
        Raises what the engine's `add` raises, or EngineClosed.
        """
        self._check_open()
        if entry is not None and self.entry_format is None:
            entry = None
        stream = _Stream(sequence, call, kv, export, entry)
        del kv, entry  # the engine releases them when it has run
        self._enter(self._streams, stream, call)
        self._submit(partial(self._add, stream))
        try:
            while not stream.ended:
                yield await stream.next()
        finally:
            self._streams.discard(stream)
            if not stream.ended:
                self._submit(partial(self._cancel, stream))

    async def hand_off(self, request_id: str, export: ExportKv) -> None:
        """End a sequence with the finish reason MOVED between two steps, and export its K and V.

        Returns once that is done; without effect on a sequence that is unknown by then.
        """
        if self._closing:
            return
        done: asyncio.Future[None] = self._loop.create_future()
        self._hand_offs.add(done)
        self._submit(partial(self._leave, request_id, export, done))
        try:
            await done
        finally:
            self._hand_offs.discard(done)

    async def compute(
        self,
        kind: str,
        token_ids: Sequence[Sequence[int]] = (),
        pixels: np.ndarray | None = None,
        pooling: str = "mean",
        normalize: bool = True,
        call: EngineCall = UNBILLED,
    ) -> dict[str, np.ndarray]:
        """Run one forward of a ComputeEngine, one at a time in order. Raises EngineError, EngineClosed."""
        self._check_open()
        forward: asyncio.Future[dict[str, np.ndarray]] = self._loop.create_future()
        self._enter(self._calls, forward, call)
        self._submit(partial(self._compute, forward, call, kind, token_ids, pixels, pooling, normalize))
        try:
            return await forward
        finally:
            self._calls.discard(forward)

    async def wait_closed(self) -> None:
        """Return once the engine is closed, on request or by a failure."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """End all streams and calls with EngineClosed, close the engine and end the thread. Idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        await self._closed.wait()
        self._thread.join()  # its last act was to set `_closed`

    # On the loop's thread.

    def _check_open(self) -> None:
        if self._closing:
            raise self._closed_error()

    def _closed_error(self) -> EngineClosed:
        return EngineClosed(
            f"the engine has failed: {self.failure}" if self.failure else "the engine is closed"
        )

    def _enter(self, members: set[Any], member: object, call: EngineCall) -> None:
        members.add(member)
        self._held[member] = call
        call.hold()

    def _release(self, member: object) -> None:
        call = self._held.pop(member, None)
        if call is not None:
            call.release()

    def _submit(self, command: Callable[[], None]) -> None:
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    def _deliver(self, outputs: list[tuple[_Stream, TokenOutput]]) -> None:
        for stream, output in outputs:
            if output.finish_reason or output.error:
                self._release(stream)
            stream.outputs.put_nowait(output)
        if self._stepped is not None:
            self._stepped()

    def _reject(self, stream: _Stream, error: EngineError) -> None:
        self._release(stream)
        stream.outputs.put_nowait(error)

    def _left(self, done: asyncio.Future[None]) -> None:
        if not done.done():
            done.set_result(None)

    def _settle(
        self,
        call: asyncio.Future[dict[str, np.ndarray]],
        result: dict[str, np.ndarray] | None,
        error: EngineError | None,
    ) -> None:
        self._release(call)
        if call.done():  # cancelled meanwhile
            return
        if error is not None:
            call.set_exception(error)
        elif result is not None:
            call.set_result(result)

    def _ended(self) -> None:
        error = self._closed_error()
        for stream in self._streams:
            stream.outputs.put_nowait(error)
        for call in self._calls:
            self._settle(call, None, error)
        for done in self._hand_offs:
            self._left(done)
        for member in list(self._held):
            self._release(member)
        self._closed.set()

    # On the engine's thread.

    def _main(self) -> None:
        try:
            while self._run_commands():
                if self._generator is not None and self._generator.has_work:
                    self._step(self._generator)
        except Exception as error:  # the engine's: reported in `failure`
            logger.exception("the engine failed and is closed")
            # Without its frames, which would keep the engine's tensors and so the region's memory.
            self.failure = error.with_traceback(None)
        finally:
            with self._condition:
                self._closing = True
            self._live.clear()
            try:
                self._engine.close()
            except Exception as error:  # a failed engine may fail to close, too
                logger.exception("the engine failed while it was closed")
                self.failure = self.failure or error.with_traceback(None)
            finally:
                self._post(self._ended)

    def _run_commands(self) -> bool:
        """Run the queued commands, after waiting for one if the engine is idle; return False to end."""
        with self._condition:
            while not (self._commands or self._closing or self._has_work()):
                self._condition.wait()
            if self._closing:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return True

    def _has_work(self) -> bool:
        return self._generator is not None and self._generator.has_work

    def _step(self, engine: GenerateEngine) -> None:
        assert self.load is not None
        self._meter.start_step()
        work: list[tuple[EngineCall, int]] = [(stream.call, 1) for stream in self._live.values()]
        started_s = time.monotonic()
        try:
            results = engine.step()
            work = [(self._live[result.request_id].call, result.work) for result in results]
        finally:
            self._meter.end_step(work)
        now_s = time.monotonic()
        self.load.stepped(results, now_s - started_s, now_s)
        outputs = []
        for output in results:
            stream = self._live[output.request_id]
            if stream.export is not None and output.token_id is not None and not output.finish_reason:
                output = self._handed_off(engine, output)
            if output.finish_reason or output.error:
                del self._live[output.request_id]
                self.load.remove(output.request_id)
            outputs.append((stream, output))
        if outputs:
            self._post(self._deliver, outputs)

    def _handed_off(self, engine: GenerateEngine, output: TokenOutput) -> TokenOutput:
        """Export the rest of a sequence and remove it from the engine; return its last output here."""
        name = request_id = output.request_id
        try:
            cast(KvExporter, engine).finish_export(request_id)
        except (EngineError, RuntimeError, MemoryError) as error:  # then it is recomputed
            logger.info("cannot export K and V of sequence %s: %s", request_id, error)
            name = ""
        engine.cancel(request_id)
        return replace(output, finish_reason=MOVED, exported_kv=name)

    def _leave(self, request_id: str, export: ExportKv, done: asyncio.Future[None]) -> None:
        stream, engine = self._live.get(request_id), self._generator
        if stream is not None and engine is not None:
            output = self._exported(cast(KvExporter, engine), request_id, export)
            engine.cancel(request_id)
            del self._live[request_id]
            if self.load is not None:
                self.load.remove(request_id)
            self._post(self._deliver, [(stream, output)])
        self._post(self._left, done)

    def _exported(self, engine: KvExporter, request_id: str, export: ExportKv) -> TokenOutput:
        """Export a sequence's K and V as far as it has run; return its last output here."""
        name = ""
        try:
            kv = in_host_memory(engine.export_kv(request_id))
            if kv.tokens:
                export(request_id, KvExport.whole(kv))
                name = request_id
        except (EngineError, RuntimeError, MemoryError) as error:  # then it is recomputed
            logger.info("cannot export K and V of sequence %s: %s", request_id, error)
        return TokenOutput(
            request_id=request_id, token_id=None, logprob=None, finish_reason=MOVED, work=0, exported_kv=name
        )

    def _add(self, stream: _Stream) -> None:
        request_id = stream.sequence.request_id
        work = self._work(stream)
        try:
            if self._generator is None:
                raise EngineError("this engine does not generate")
            if request_id in self._live:
                raise EngineError(f"sequence {request_id} is running already")
            self._add_to_engine(self._generator, stream)
        except EngineError as error:
            self._post(self._reject, stream, error)
        else:
            self._live[request_id] = stream
            left = stream.sequence.sampling.max_tokens - len(stream.sequence.generated_ids)
            if stream.export is not None and left > 1:
                started = partial(self._export_started, stream, stream.export)
                cast(KvExporter, self._generator).export(request_id, started)
            if self.load is not None:
                self.load.add(request_id, work)

    def _work(self, stream: _Stream) -> int:
        """Return the prompt tokens of a sequence to run, without those that come with K and V.

        By the layers that it has left.
        """
        tokens = len(stream.sequence.prompt_ids) + len(stream.sequence.generated_ids)
        if stream.kv:
            return max(1, tokens - min(one.tokens for one in stream.kv))
        if stream.entry is None or self.entry_format is None:
            return tokens
        return math.ceil(tokens * self.entry_format.share(stream.entry))

    def _export_started(self, stream: _Stream, export: ExportKv, kv: KvExport) -> None:
        name = stream.sequence.request_id
        export(name, kv)
        output = TokenOutput(
            request_id=name, token_id=None, logprob=None, finish_reason="", work=0, exported_kv=name
        )
        self._post(self._deliver, [(stream, output)])

    def _add_to_engine(self, engine: GenerateEngine, stream: _Stream) -> None:
        kv, entry = stream.kv, stream.entry
        stream.kv, stream.entry = (), None
        if kv or entry is not None:
            try:
                cast(KvReceiver, engine).add(stream.sequence, kv, entry)
            except InvalidSequence as error:  # of the sequence or of what came with it
                logger.info(
                    "sequence %s: nothing imported, prompt recomputed: %s",
                    stream.sequence.request_id,
                    error,
                )
            else:
                return
        engine.add(stream.sequence)

    def _cancel(self, stream: _Stream) -> None:
        request_id = stream.sequence.request_id
        if self._generator is not None and self._live.get(request_id) is stream:
            del self._live[request_id]
            self._generator.cancel(request_id)
            if self.load is not None:
                self.load.remove(request_id)
        self._post(self._release, stream)

    def _compute(
        self, forward: asyncio.Future[dict[str, np.ndarray]], call: EngineCall, *arguments: Any
    ) -> None:
        if forward.cancelled():
            self._post(self._release, forward)
            return
        try:
            if self._generator is not None:
                raise EngineError("this engine generates; it computes nothing else")
            self._meter.start_step()
            try:
                result = cast(ComputeEngine, self._engine).compute(*arguments)
            finally:
                self._meter.end_step([(call, 1)])
        except EngineError as error:
            self._post(self._settle, forward, None, error)
        except Exception as error:  # of this call alone: raised to its caller
            logger.exception("a forward failed")
            self._post(self._settle, forward, None, EngineError(f"the engine failed in this call: {error}"))
        else:
            self._post(self._settle, forward, result, None)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        # If the loop is closed already, nothing is left to read this.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)
