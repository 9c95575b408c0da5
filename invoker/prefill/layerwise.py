"""Layer-wise prefill: a node that loads alone runs waiting prompts through its layers as they land.

When the instance is ready, its engine continues from their K and V, so that of a prefill only the last layers
are left. The engine samples all tokens and always runs a prompt's last token. Prompts without room, or that
arrive late, are left to the engine.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import torch

from invoker.base.errors import NoSuchInstance, NoSuchPipeline, PipelineLost
from invoker.engine.contract import EngineCall, EngineError, NewSequence, TokenOutput
from invoker.engine.kv.cache import pages_for
from invoker.engine.kv.slices import KvSlice
from invoker.engine.stage_contract import Stage
from invoker.instances.instance import Instance
from invoker.pipeline.driver import moved_output
from invoker.pipeline.metered import StepCalls
from invoker.prefill.layers import CHUNK_TOKENS, LayerChain, PromptChunk, synchronize
from invoker.prefill.zigzag_queue import PromptBatch, ZigZagQueue
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.threads import run_in_thread
from registry.records.instance import InstanceState

_HANDOVER_TIMEOUT_S = 5.0  # for prompts in progress when the instance is ready: few layers are left
# For the rest of the load: a request that would wait longer should move to a node that is ready sooner.
READY_TIMEOUT_S = 60.0
_FAULTS = (EngineError, RuntimeError, MemoryError)  # of steps, or of copies without room

log = logging.getLogger("invoker.stages")


class LayerStages(Protocol):
    """The part of LayerStageFactory that creates stages, whose steps are charged to `calls`."""

    layers: int

    def calls(self) -> StepCalls: ...

    async def make(self, layer: int) -> Stage: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwisePrompt:
    """The outcome of a layer-wise prefill: `kv` for the engine (empty: none was computed), or `moved`."""

    kv: tuple[KvSlice, ...] = ()
    moved: bool = False


@dataclass(eq=False, slots=True)
class _WaitingPrompt:
    """A sequence whose prompt waits.

    `tokens` are all but the last. `rows` is the next layer's input, None until there is room for K and V.
    """

    name: str
    sequence: NewSequence
    tokens: list[int]
    result: "asyncio.Future[LayerwisePrompt]"
    rows: torch.Tensor | None = None
    kv: tuple[KvSlice, ...] = ()  # set at the handover
    layers: int = 0  # that have run
    refused: bool = False  # a layer failed, or the prompt is too long

    @property
    def pages(self) -> int:
        return pages_for(len(self.tokens))


class LayerwisePrefillDriver:
    """Runs waiting prompts by layers until the instance is ready; running from its construction.

    It has PipelineDriver's interface, but moves only requests whose prompts wait. Layers' steps run in
    threads, one at a time. If the instance is not ready after `ready_timeout_s` the driver fails and its
    requests move.
    """

    def __init__(
        self,
        instance: Instance,
        factory: LayerStages,
        first: Stage,
        *,
        name: str,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        self._instance = instance
        self._longest = first.facts.longest
        self._patience_s = ready_timeout_s
        self._maker = factory
        self._chain = LayerChain([first])
        self._queue = ZigZagQueue(factory.layers)
        self._queue.set_loaded_layers(1)
        self._calls = factory.calls()
        self._free_pages = first.pages
        self._prompts: dict[str, _WaitingPrompt] = {}  # oldest first
        self._ended: list[_WaitingPrompt] = []  # ended, with K and V still in the layers
        self._is_ready = False
        self._refusal: Exception | None = None  # why new requests are refused
        self._names = 0
        self._streams = 0
        self._changed = asyncio.Event()
        self._emptied = asyncio.Event()
        self.failure: Exception | None = None
        self.prefilled_prompts = 0  # handed to the engine with K and V
        self._tasks = [
            asyncio.create_task(self._run_guarded(self._wait), name=f"{name} grows"),
            asyncio.create_task(self._run_guarded(self._work), name=name),
        ]

    def __repr__(self) -> str:
        return (
            f"<LayerwisePrefillDriver {self._queue!r}, {self._streams} streams, "
            f"{self.prefilled_prompts} prompts prefilled>"
        )

    @property
    def streams(self) -> int:
        """Return the number of running streams."""
        return self._streams

    async def generate(self, sequence: NewSequence, call: EngineCall) -> AsyncGenerator[TokenOutput, None]:
        """Run a request as EngineRunner.generate does.

        A moved one ends with finish reason MOVED and no token.
        """
        if self._refusal is not None:
            raise self._refusal
        self._streams += 1
        try:
            found = await self._prefilled(sequence)
            if found.moved:
                yield moved_output(sequence.request_id)
                return
            with self._instance.working():
                async with aclosing(self._engine(sequence, call, found)) as outputs:
                    del found  # frees K and V once the engine has copied them
                    async for output in outputs:
                        yield output
        except NoSuchInstance as error:  # its layers have run here: it continues, not restarts
            raise PipelineLost(str(error)) from error
        finally:
            self._streams -= 1

    def move(self, request_ids: Iterable[str] = ()) -> None:
        """Move these requests if their prompts wait.

        If none are named, move all waiting and refuse new ones.
        """
        wanted = frozenset(request_ids)
        if not wanted:
            self._refusal = self._refusal or NoSuchPipeline("the pipeline ends")
        for prompt in tuple(self._prompts.values()):
            if not wanted or prompt.sequence.request_id in wanted:
                _resolve(prompt, LayerwisePrompt(moved=True))

    async def aclose(self) -> None:
        """End; hand prompts in progress to the engine if the instance is ready, move the others.

        Idempotent.
        """
        self._refusal = self._refusal or NoSuchPipeline("the pipeline ends")
        if self._instance.state is InstanceState.READY and self._prompts and not self._tasks[1].done():
            emptied = asyncio.create_task(self._emptied.wait())
            await asyncio.wait(
                [emptied, self._tasks[1]], timeout=_HANDOVER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            emptied.cancel()
        self.move()
        await cancel_and_wait(*self._tasks)
        self._calls.release_all()

    def fail(self, reason: Exception) -> None:
        """End waiting requests with `reason` and refuse new ones, after the driver has failed."""
        self._refusal = reason
        for prompt in tuple(self._prompts.values()):
            if not prompt.result.done():
                prompt.result.set_exception(reason)

    async def wait_closed(self) -> None:
        """Return once the driver has ended."""
        await asyncio.wait(self._tasks[1:])

    # --- inside

    async def _prefilled(self, sequence: NewSequence) -> LayerwisePrompt:
        tokens = [*sequence.prompt_ids, *sequence.generated_ids][:-1]
        if self._is_ready or self._tasks[1].done():
            return LayerwisePrompt()
        self._names += 1
        result: asyncio.Future[LayerwisePrompt] = asyncio.get_running_loop().create_future()
        prompt = _WaitingPrompt(
            str(self._names), sequence, tokens, result, refused=len(tokens) >= self._longest
        )
        self._prompts[prompt.name] = prompt
        self._emptied.clear()
        self._changed.set()
        try:
            return await result
        finally:
            del self._prompts[prompt.name]
            self._queue.drop(prompt.name)
            if prompt.rows is not None:
                self._ended.append(prompt)
            if not self._prompts:
                self._emptied.set()
            self._changed.set()

    def _engine(
        self, sequence: NewSequence, call: EngineCall, found: LayerwisePrompt
    ) -> AsyncGenerator[TokenOutput, None]:
        """By the instance's own. Raises NoSuchInstance."""
        runner = self._instance.runner
        if runner is None:
            raise NoSuchInstance(f"instance {self._instance.id} has ended")
        return runner.generate(sequence, call, found.kv)

    async def _run_guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Keep what `work` fails with as `failure`, and cancel the other task."""
        try:
            await work()
        except Exception as error:
            log.exception("layer-wise prefill failed")
            self.failure = error.with_traceback(None)
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()

    async def _wait(self) -> None:
        """Add layers until the instance is ready, or until the timeout."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._grow()
        except TimeoutError:
            self.move()
            self.failure = PipelineLost(f"it is not ready after {self._patience_s:g} s")
            self._tasks[1].cancel()

    async def _grow(self) -> None:
        """Add each layer as it lands, then wait until the instance is ready."""
        try:
            for layer in range(1, self._maker.layers):
                self._chain.append(await self._maker.make(layer))
                self._queue.set_loaded_layers(layer + 1)
                self._changed.set()
        except (NoSuchInstance, *_FAULTS) as error:  # waiting prompts are left to the engine
            log.info("instance %s: no more layers for layer-wise prefill: %r", self._instance.id, error)
        await self._instance.wait_settled()
        self._is_ready = self._instance.state is InstanceState.READY
        self._changed.set()

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            await self._drop_ended()
            self._admit()
            if self._is_ready:
                await self._hand_over()
            if not await self._run_next():
                await self._changed.wait()

    def _admit(self) -> None:
        """Start prompts, in order, while there is room for their K and V."""
        for prompt in () if self._is_ready else tuple(self._prompts.values()):
            if prompt.rows is None and not prompt.refused and 0 < prompt.pages <= self._free_pages:
                self._free_pages -= prompt.pages
                prompt.rows = torch.tensor(prompt.tokens, dtype=torch.int64)
                self._calls.enter(prompt.name, prompt.sequence.request_id)
                self._queue.add(PromptBatch(name=prompt.name, tokens=len(prompt.tokens)))

    async def _hand_over(self) -> None:
        """Hand all prompts to the engine.

        Those in progress with K and V, after one step for their other layers.
        """
        waiting = [prompt for prompt in self._prompts.values() if not prompt.result.done()]
        started = [prompt for prompt in waiting if prompt.layers]
        for prompt in waiting:
            self._queue.drop(prompt.name)
        if started and len(self._chain) == self._maker.layers:
            try:
                await run_in_thread(self._finish, started)
            except _FAULTS as error:
                log.info("%d prompts left to the engine: %s", len(started), error)
        for prompt in waiting:
            if not prompt.result.done():
                self.prefilled_prompts += bool(prompt.kv)
                prompt.result.set_result(LayerwisePrompt(kv=prompt.kv))

    def _finish(self, prompts: Sequence[_WaitingPrompt]) -> None:
        """Run a prompt through a layer, by chunks; in a thread."""
        layers = self._maker.layers

        def run() -> None:
            for prompt in prompts:
                for layer in range(prompt.layers, layers):
                    self._run(prompt, layer)

        work = [(prompt.name, len(prompt.tokens) * (layers - prompt.layers)) for prompt in prompts]
        if any(tokens for _, tokens in work):
            self._calls.metered(run, work)
        for prompt in prompts:
            prompt.kv = self._chain.slices(prompt.name, 0, layers)

    async def _run_next(self) -> bool:
        """Run the next layer of the oldest prompt that has one; return False if there is none."""
        work = self._queue.next_for_target()
        if work is None:
            return False
        prompt, layer = self._prompts[work.batch.name], work.first
        ran = [(prompt.name, len(prompt.tokens))]
        try:
            await run_in_thread(self._calls.metered, lambda: self._run(prompt, layer), ran)
        except _FAULTS as error:
            log.info("prompt left to the engine, layer %d failed: %s", layer, error)
            self._queue.drop(prompt.name)
            prompt.layers, prompt.refused = 0, True
        else:
            self._queue.complete(work)
        return True

    def _run(self, prompt: _WaitingPrompt, layer: int) -> None:
        """In a thread."""
        rows, outputs, total = prompt.rows, list[torch.Tensor](), len(prompt.tokens)
        assert rows is not None
        for start in range(0, total, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, total - start)
            chunk = PromptChunk(name=prompt.name, start=start, count=count, total=total)
            outputs.append(synchronize(self._chain.run(layer, chunk, rows[start : start + count])))
        prompt.rows, prompt.layers = torch.cat(outputs) if len(outputs) > 1 else outputs[0], layer + 1

    async def _drop_ended(self) -> None:
        """Free the K and V of ended prompts."""
        while self._ended:
            prompt = self._ended.pop()
            await run_in_thread(self._chain.drop, prompt.name)
            self._calls.release(prompt.name)
            self._free_pages += prompt.pages


def _resolve(prompt: _WaitingPrompt, found: LayerwisePrompt) -> None:
    if not prompt.result.done():
        prompt.result.set_result(found)
