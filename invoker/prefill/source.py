"""The source of a pair: an instance whose waiting prompts a loading node (the target) prefills in part.

Waiting prompts are offered to the target, which runs their first layers, one layer at a time, as far as it
has loaded them. When the source is free it takes the oldest prompt with the target's hidden states and K and
V, runs the other layers, and hands the sequence with all K and V to the instance's engine. The engine samples
all tokens and always runs a prompt's last token, so a lost target costs only its work.

A node that loads alone is both: its source is free once its instance is ready, and then takes all prompts.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

import torch

from invoker.base.errors import NoSuchInstance, NoSuchPipeline, PipelineLost
from invoker.engine.contract import EngineCall, NewSequence, TokenOutput
from invoker.engine.kv.cache import pages_for
from invoker.engine.kv.slices import KvSlice
from invoker.engine.stage_contract import Stage, rows_from_bytes
from invoker.instances.instance import Instance
from invoker.links.framing import LinkFrame, LinkLost
from invoker.pipeline.driver import moved_output
from invoker.pipeline.stage_thread import WireThread
from invoker.prefill.frames import (
    MAX_TOKENS,
    PairMessage,
    PromptDrop,
    PromptHandover,
    PromptOffer,
    PromptRequest,
    encode,
    pair_reader,
)
from invoker.prefill.layers import FAULTS, LayerChain, LoadedLayers, PromptChunk
from registry.records.instance import InstanceState

_HANDOVER_TIMEOUT_S = 5.0  # for prompts in progress when the instance is ready: few layers are left
# For the rest of the load: a request that would wait longer should move to a node that is ready sooner.
READY_TIMEOUT_S = 60.0

log = logging.getLogger("invoker.stages")


class _SourceState(Enum):
    """What the source does; it takes the oldest prompt while it is FREE.

    LOADING ends when the instance is ready, each other state in FREE.
    """

    LOADING = auto()  # it has no engine yet
    FREE = auto()
    REQUESTED = auto()  # it waits for a prompt of the target
    RUNNING = auto()  # it runs the layers that the target has not run
    OCCUPIED = auto()  # its engine runs a whole prompt, until the first token


class LayerStages(Protocol):
    """The part of LayerStageFactory that creates stages."""

    layers: int

    async def make(self, layer: int) -> Stage: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPrompt:
    """The outcome of a prefill by the pair: `kv` for the engine, or `moved`.

    Without K and V the engine runs the whole prompt, and `occupies` the source meanwhile.
    """

    kv: tuple[KvSlice, ...] = ()
    occupies: bool = False
    moved: bool = False


@dataclass(eq=False, slots=True)
class _WaitingPrompt:
    """A sequence that waits or is prefilled by the pair; `tokens` are all but the last."""

    name: str
    sequence: NewSequence
    tokens: list[int]
    result: "asyncio.Future[PairPrompt]"
    offered: bool = False

    @property
    def pages(self) -> int:
        return pages_for(len(self.tokens))


@dataclass(slots=True)
class _Job:
    """A prompt that the target has run through `layers` layers, with its hidden states.

    `kv` are the target's K and V; empty if it has the same chain.
    """

    prompt: _WaitingPrompt
    layers: int
    hidden: torch.Tensor
    kv: memoryview
    done: int = 0  # tokens


class PairDriver(WireThread[PairMessage]):
    """The source's thread, running from its construction.

    It has PipelineDriver's interface, but moves only requests whose prompts wait; those in the engine stay.
    `pages` is the number of KV pages in each of the target's layers. A node that is its own target has it as
    `own`, whose chain is the source's too.
    """

    def __init__(
        self,
        instance: Instance,
        chain: LayerChain,
        before: socket.socket,
        behind: socket.socket,
        *,
        pages: int,
        name: str,
        own: LoadedLayers | None = None,
    ) -> None:
        super().__init__(before, behind, pair_reader(), name=name)
        self._instance = instance
        self._chain = chain
        self._facts = chain.facts
        self._own = own
        self._free_pages = pages
        self._prompts: set[_WaitingPrompt] = set()  # the loop's: those that wait for their result
        self._running = 0  # the loop's: streams
        self._refusal: Exception | None = None  # the loop's: why new requests are refused
        self._names = 0
        self._waiting: dict[str, _WaitingPrompt] = {}  # the thread's from here on, oldest first
        self._state = _SourceState.FREE if own is None else _SourceState.LOADING
        self._occupant = ""  # the prompt that the engine runs, if OCCUPIED
        self._job: _Job | None = None  # if RUNNING
        self._found: list[tuple[_WaitingPrompt, PairPrompt]] = []  # to be handed over
        self.prefilled_prompts = 0  # handed to the engine with K and V
        self.start()

    def __repr__(self) -> str:
        state = "ended" if self._closed.is_set() else "running"
        return f"<PairDriver {state}, {self._running} streams, {self.prefilled_prompts} prompts prefilled>"

    @property
    def streams(self) -> int:
        """Return the number of running streams."""
        return self._running

    async def generate(self, sequence: NewSequence, call: EngineCall) -> AsyncGenerator[TokenOutput, None]:
        """Run a request as EngineRunner.generate does.

        A moved one ends with finish reason MOVED, no token. Raises NodeDraining, PipelineLost, EngineError.
        """
        if self._refusal is not None:
            raise self._refusal
        self._running += 1
        self._names += 1
        name, occupies = str(self._names), False
        try:
            found = await self._prefilled(name, sequence)
            if found.moved:
                yield moved_output(sequence.request_id)
                return
            occupies = found.occupies
            with self._instance.working():
                async with aclosing(self._engine(sequence, call, found)) as outputs:
                    del found  # frees K and V once the engine has copied them
                    async for output in outputs:
                        if occupies and (output.token_id is not None or output.error):
                            occupies = False
                            self._submit(partial(self._vacate, name))
                        yield output
        except NoSuchInstance as error:  # its layers may have run here: it continues, not restarts
            raise PipelineLost(str(error)) from error
        finally:
            self._running -= 1
            if occupies:
                self._submit(partial(self._vacate, name))

    def move(self, request_ids: Iterable[str] = ()) -> None:
        """Move these requests if their prompts wait; if none are named, move all waiting, refuse new ones."""
        wanted = frozenset(request_ids)
        if not wanted:
            self._refusal = self._refusal or NoSuchPipeline("the pair ends")
        for prompt in tuple(self._prompts):
            if not wanted or prompt.sequence.request_id in wanted:
                _resolve(prompt, PairPrompt(moved=True))

    def add_layer(self, stage: Stage) -> None:
        """Add the stage of the next layer of a node that is its own target."""
        assert self._own is not None
        self._submit(partial(self._own.append, stage))

    def set_ready(self) -> None:
        """Record that the instance is ready: the engine runs prompts from now on."""
        self._submit(self._set_ready)

    def abort(self, reason: Exception) -> None:
        """Move waiting requests and end the thread, with `reason` as its failure."""
        self.move()
        self.failure = reason
        self._closing.set()
        self._wire.wake()

    async def aclose(self) -> None:
        """Move waiting requests and end the pair after the current step; the engine keeps its own.

        A node that is its own target first hands them to its engine, if that is ready. Idempotent.
        """
        self._refusal = self._refusal or NoSuchPipeline("the pair ends")
        waiting = [prompt.result for prompt in self._prompts]
        if self._own is not None and self._instance.state is InstanceState.READY and waiting:
            await asyncio.wait(waiting, timeout=_HANDOVER_TIMEOUT_S)
        self.move()
        await super().aclose()

    def fail(self, reason: Exception) -> None:
        """Refuse new requests with `reason`, after the pair has failed.

        The engine runs the waiting ones; where there is none yet, they end.
        """
        self._refusal = reason
        for prompt in tuple(self._prompts):
            if self._instance.runner is not None:
                _resolve(prompt, PairPrompt())
            elif not prompt.result.done():
                prompt.result.set_exception(reason)

    # On the event loop.

    async def _prefilled(self, name: str, sequence: NewSequence) -> PairPrompt:
        tokens = [*sequence.prompt_ids, *sequence.generated_ids][:-1]
        prompt = _WaitingPrompt(name, sequence, tokens, asyncio.get_running_loop().create_future())
        self._prompts.add(prompt)
        self._submit(partial(self._add, prompt))
        found: PairPrompt | None = None
        try:
            found = await prompt.result
            return found
        finally:
            self._prompts.discard(prompt)
            self._submit(partial(self._drop, name))
            if found is None or not found.occupies:  # the thread may have marked it as occupied meanwhile
                self._submit(partial(self._vacate, name))

    def _engine(
        self, sequence: NewSequence, call: EngineCall, found: PairPrompt
    ) -> AsyncGenerator[TokenOutput, None]:
        """Run a request on the instance's engine. Raises NoSuchInstance."""
        runner = self._instance.runner
        if runner is None:
            raise NoSuchInstance(f"instance {self._instance.id} has ended")
        return runner.generate(sequence, call, found.kv)

    # On the thread.

    def _on_idle(self) -> bool:
        self._on_wake()
        self._take_next()
        self._offer()
        if self._job is not None:
            self._run_chunk(self._job)
            return True
        self._hand_over()
        return self._own is not None and self._own.run_chunk()

    def _on_frame(self, frame: LinkFrame[PairMessage]) -> None:
        message = frame.message
        if not isinstance(message, PromptHandover) or self._state is not _SourceState.REQUESTED:
            raise LinkLost(f"unexpected message from the target: {type(message).__name__}")
        self._state = _SourceState.FREE
        prompt = self._waiting.get(message.name)
        if prompt is None:
            return  # dropped meanwhile
        hidden_bytes = len(prompt.tokens) * self._facts.row_bytes if message.layers else 0
        if message.layers >= len(self._chain) or message.hidden_bytes != hidden_bytes:
            raise LinkLost(f"invalid handover from the target: {message} of {len(prompt.tokens)} tokens")
        hidden = rows_from_bytes(frame.payload[:hidden_bytes], self._facts.row_dtype, self._facts.row_items)
        self._start(message.name, message.layers, hidden, frame.payload[hidden_bytes:])

    def _on_end(self) -> None:
        self._chain.release_calls()
        waiting = [*self._waiting.values(), *([self._job.prompt] if self._job is not None else [])]
        self._waiting.clear()
        self._job = None
        if self._state is not _SourceState.LOADING:  # else `fail` resolves them
            self._found += [(prompt, PairPrompt()) for prompt in waiting]
        self._hand_over()

    def _hand_over(self) -> None:
        """Hand prompts to the engine together, so that their first tokens are of one step."""
        found, self._found = self._found, []
        for prompt, one in found:
            self._call_loop(_resolve, prompt, one)

    def _set_ready(self) -> None:
        self._state = _SourceState.FREE

    def _vacate(self, name: str) -> None:
        if self._state is _SourceState.OCCUPIED and self._occupant == name:
            self._state = _SourceState.FREE

    def _add(self, prompt: _WaitingPrompt) -> None:
        if not prompt.result.done():
            self._waiting[prompt.name] = prompt

    def _drop(self, name: str) -> None:
        """Forget a prompt that has its result or was cancelled."""
        prompt = self._waiting.pop(name, None)
        if prompt is not None and prompt.offered:
            self._free_pages += prompt.pages
            if self._own is not None:
                self._own.drop(name)
            else:
                self._wire.send(encode(PromptDrop(name)))
        if self._job is not None and self._job.prompt.name == name:
            self._finish_job(self._job)

    def _take_next(self) -> None:
        """Start the oldest prompt if the source is free: take it from the target if it was offered.

        A node that is its own target leaves none to it: all that have not started run in the engine together.
        """
        while self._waiting and self._state is _SourceState.FREE:
            first = next(iter(self._waiting.values()))
            if not first.offered:
                self._run_in_engine(self._waiting.pop(first.name))
            elif self._own is None:
                self._state = _SourceState.REQUESTED
                self._wire.send(encode(PromptRequest()))
            elif (taken := self._own.take()) is not None:
                layers = taken.layers if self._own.is_complete else 0
                self._start(taken.name, layers, taken.rows, memoryview(b""))
            else:
                return

    def _start(self, name: str, layers: int, hidden: torch.Tensor, kv: memoryview) -> None:
        """Start a prompt after the layers that the target has run."""
        prompt = self._waiting.pop(name)
        job = _Job(prompt, layers, hidden, kv)
        if layers:
            self._chain.enter(name, prompt.sequence.request_id)
            self._job, self._state = job, _SourceState.RUNNING
        else:
            self._finish_job(job)
            self._run_in_engine(prompt)

    def _run_in_engine(self, prompt: _WaitingPrompt) -> None:
        occupies = self._own is None
        if occupies:
            self._state, self._occupant = _SourceState.OCCUPIED, prompt.name
        self._found.append((prompt, PairPrompt(occupies=occupies)))

    def _offer(self) -> None:
        """Offer prompts to the target, in order, while it has free pages."""
        for prompt in self._waiting.values():
            tokens = len(prompt.tokens)
            if prompt.offered or not 0 < tokens < min(MAX_TOKENS + 1, self._facts.longest):
                continue
            if prompt.pages > self._free_pages:
                return
            prompt.offered = True
            self._free_pages -= prompt.pages
            ids, call = torch.tensor(prompt.tokens, dtype=torch.int64), prompt.sequence.request_id
            if self._own is not None:
                self._own.add(prompt.name, call, ids)
            else:
                offer = PromptOffer(prompt.name, call, tokens)
                self._wire.send(encode(offer), ids.view(torch.uint8).numpy().data)

    def _run_chunk(self, job: _Job) -> None:
        """Run the next tokens of a prompt through the other layers; hand it to the engine at the end."""
        prompt, chain, total = job.prompt, self._chain, len(job.prompt.tokens)
        kv: tuple[KvSlice, ...] = ()
        try:
            if job.layers < len(chain):
                chunk = PromptChunk.after(prompt.name, job.done, total)
                chain.run(job.layers, len(chain), chunk, job.hidden[chunk.start : chunk.start + chunk.count])
                job.done += chunk.count
            else:
                job.done = total
            if job.done == total:
                kv = self._slices(job)
        except LinkLost:
            raise
        except FAULTS as error:  # the engine may have room for it
            log.info("prompt left to the engine: %r", error)
            self._finish_job(job)
            self._run_in_engine(prompt)
            return
        if kv:
            self._finish_job(job)
            self.prefilled_prompts += 1
            self._found.append((prompt, PairPrompt(kv=kv)))

    def _slices(self, job: _Job) -> tuple[KvSlice, ...]:
        """Return K and V of all layers: the target's, and those of the chain here."""
        name, last = job.prompt.name, len(self._chain)
        if self._own is not None:
            return self._chain.slices(name, 0, last)
        own = self._chain.slices(name, job.layers, last)
        return (_slice_of(job, own), *own)

    def _finish_job(self, job: _Job) -> None:
        self._job, self._state = None, _SourceState.FREE
        self._free_pages += job.prompt.pages
        self._chain.drop(job.prompt.name)


async def add_layers(add: Callable[[Stage], None], factory: LayerStages, first: int, last: int) -> None:
    """Create the stages of the layers `[first, last)` as they land. Raises EngineError, NoSuchInstance."""
    for layer in range(first, last):
        add(await factory.make(layer))


async def follow_load(
    driver: PairDriver, instance: Instance, factory: LayerStages, timeout_s: float = READY_TIMEOUT_S
) -> None:
    """Add layers to the driver of a node that loads alone, until its instance is ready.

    After `timeout_s`, or an unexpected error, the driver is aborted and its requests move.
    """
    try:
        async with asyncio.timeout(timeout_s):
            try:
                await add_layers(driver.add_layer, factory, 1, factory.layers)
            except (NoSuchInstance, *FAULTS) as error:  # waiting prompts are left to the engine
                log.info("instance %s: no more layers for layer-wise prefill: %r", instance.id, error)
            await instance.wait_settled()
        if instance.state is InstanceState.READY:
            driver.set_ready()
    except TimeoutError:
        driver.abort(PipelineLost(f"it is not ready after {timeout_s:g} s"))
    except Exception as error:
        log.exception("layer-wise prefill failed")
        driver.abort(error.with_traceback(None))


def _resolve(prompt: _WaitingPrompt, found: PairPrompt) -> None:
    if not prompt.result.done():
        prompt.result.set_result(found)


def _slice_of(job: _Job, own: Sequence[KvSlice]) -> KvSlice:
    """Return the target's K and V as a slice; layers are as large as those here. Raises LinkLost."""
    shape, dtype = own[0].data.shape, own[0].data.dtype
    if len(job.kv) != job.layers * own[0].nbytes:
        raise LinkLost(f"received {len(job.kv)} bytes of K and V for {job.layers} layers")
    data = torch.frombuffer(job.kv, dtype=dtype).view(job.layers, *shape[1:])
    return KvSlice(first=0, last=job.layers, data=data)
