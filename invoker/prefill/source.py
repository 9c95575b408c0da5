"""The source of a pair: an overloaded instance, whose prompts a node that is still loading helps to run.

A prompt waits here, and is offered to the target, which runs its first layers as far as it has them, one
layer at a time. Whenever the source has run a prompt it takes the first that waits, with what the target has
made of it, runs the other layers, and gives the sequence with all its K and V to the instance's own engine.
So all tokens are the engine's, whatever becomes of the pair: a prompt that nobody helped with is simply the
engine's. Its last token is always left to the engine, which draws from it.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import torch

from invoker.engine.contract import EngineCall, EngineError, NewSequence, TokenOutput
from invoker.engine.kv_cache import pages_for
from invoker.engine.kv_slices import KvSlice
from invoker.engine.stage_contract import rows_of_bytes
from invoker.errors import NoSuchInstance, NoSuchPipeline
from invoker.instance import Instance
from invoker.stages.driver import moved_output
from invoker.stages.frames import LinkLost
from invoker.stages.metered import StepCalls
from invoker.stages.stage_thread import WireThread
from invoker.stages.zigzag_frames import MAX_TOKENS, Drop, Given, Offer, PairFrame, PairReader, Take, pack
from invoker.stages.zigzag_layers import CHUNK_TOKENS, LayerChain, Part, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """How a prompt comes to the engine: with `kv`, or to be run there, which it `occupies` meanwhile; or the
    call is to go on elsewhere."""

    kv: tuple[KvSlice, ...] = ()
    occupies: bool = False
    moved: bool = False


@dataclass(eq=False, slots=True)
class _Prompt:
    """A sequence that has not begun to run, or is being run by the pair. `tokens` are all but the last."""

    name: str
    sequence: NewSequence
    tokens: list[int]
    result: "asyncio.Future[Prefill]"
    offered: bool = False

    @property
    def pages(self) -> int:
        return pages_for(len(self.tokens))


@dataclass(slots=True)
class _Job:
    """A prompt of which the target has run `layers` layers, with what it made of them."""

    prompt: _Prompt
    layers: int
    hidden: torch.Tensor
    kv: memoryview
    done: int = 0  # tokens


class PairDriver(WireThread[PairFrame]):
    """At work from when it is made. As PipelineDriver it takes calls and moves them, but only those whose
    prompts wait: what the engine has goes on there. `target_pages` are those of each of the target's layers.
    """

    def __init__(
        self,
        instance: Instance,
        chain: LayerChain,
        calls: StepCalls,
        before: socket.socket,
        behind: socket.socket,
        *,
        target_pages: int,
        name: str,
    ) -> None:
        super().__init__(before, behind, PairReader(), name=name)
        self._instance = instance
        self._chain = chain
        self._facts = chain.facts
        self._calls = calls
        self._free_pages = target_pages
        self._prompts: set[_Prompt] = set()  # the loop's: those that wait for their Prefill
        self._running = 0  # the loop's: streams
        self._refusal: Exception | None = None  # the loop's: why nothing new is taken
        self._names = 0
        self._waiting: dict[str, _Prompt] = {}  # the thread's from here on, the earliest first
        self._asked = False  # the target is to give a prompt
        self._occupied: set[str] = set()  # prompts that the engine runs
        self._job: _Job | None = None
        self.helped = 0  # prompts of which the target has run layers
        self.layers_saved = 0  # and how many layers in all
        self.start()

    def __repr__(self) -> str:
        state = "ended" if self._closed.is_set() else "at work"
        return f"<PairDriver {state}, {self._running} streams, {self.helped} helped with>"

    @property
    def streams(self) -> int:
        """How many are under way."""
        return self._running

    async def generate(self, sequence: NewSequence, call: EngineCall) -> AsyncGenerator[TokenOutput, None]:
        """As EngineRunner.generate; one that is moved ends with the finish reason MOVED, and no token."""
        if self._refusal is not None:
            raise self._refusal
        self._running += 1
        prompt = self._prompt(sequence)
        try:
            found = await self._prefilled(prompt)
            if found.moved:
                yield moved_output(sequence.request_id)
                return
            async with aclosing(self._run(prompt, found, call)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._running -= 1

    def leave(self, request_ids: Iterable[str] = ()) -> None:
        """Move these calls, if their prompts wait; if none are named, all such, and nothing new is taken."""
        wanted = frozenset(request_ids)
        if not wanted:
            self._refusal = self._refusal or NoSuchPipeline("the pair ends")
        for prompt in [one for one in self._prompts if not wanted or one.sequence.request_id in wanted]:
            self._tell(prompt, Prefill(moved=True))

    async def aclose(self) -> None:
        """Move what waits, and end the pair after the step under way; what the engine has it goes on with.
        Idempotent."""
        self.leave()
        await super().aclose()

    def end(self, reason: Exception) -> None:
        """It has ended by itself: nothing new comes here, and what waits is the engine's."""
        self._refusal = reason
        for prompt in tuple(self._prompts):
            self._tell(prompt, Prefill())

    # The loop's side.

    def _prompt(self, sequence: NewSequence) -> _Prompt:
        self._names += 1
        tokens = [*sequence.prompt_ids, *sequence.generated_ids][:-1]
        future: asyncio.Future[Prefill] = asyncio.get_running_loop().create_future()
        return _Prompt(str(self._names), sequence, tokens, future)

    async def _prefilled(self, prompt: _Prompt) -> Prefill:
        if not prompt.tokens or len(prompt.tokens) > MAX_TOKENS:
            return Prefill()
        self._prompts.add(prompt)
        self._submit(partial(self._add, prompt))
        found: Prefill | None = None
        try:
            found = await prompt.result
            return found
        finally:
            self._prompts.discard(prompt)
            self._submit(partial(self._drop, prompt.name))
            if found is None or not found.occupies:  # the thread may not know that yet
                self._submit(partial(self._vacate, prompt.name))

    async def _run(
        self, prompt: _Prompt, found: Prefill, call: EngineCall
    ) -> AsyncGenerator[TokenOutput, None]:
        """By the instance's own engine. Raises Draining, NoSuchInstance, EngineError."""
        occupies = found.occupies
        try:
            runner = self._instance.runner
            if runner is None:
                raise NoSuchInstance(f"instance {self._instance.id} has ended")
            with self._instance.working():
                async with aclosing(runner.generate(prompt.sequence, call, found.kv)) as outputs:
                    async for output in outputs:
                        if occupies and (output.token_id is not None or output.error):
                            occupies = False
                            self._submit(partial(self._vacate, prompt.name))
                        yield output
        finally:
            if occupies:
                self._submit(partial(self._vacate, prompt.name))

    def _tell(self, prompt: _Prompt, found: Prefill) -> None:
        if not prompt.result.done():
            prompt.result.set_result(found)

    # The thread's side.

    def _post(self, prompt: _Prompt, found: Prefill) -> None:
        self._call_loop(self._tell, prompt, found)

    def _on_idle(self) -> bool:
        self._on_wake()
        if self._job is None:
            self._take()
        self._offer()
        if self._job is not None:
            self._run_part(self._job)
        return self._job is not None

    def _on_frame(self, frame: PairFrame) -> None:
        said = frame.said
        if not isinstance(said, Given) or not self._asked:
            raise LinkLost("the target says what it was not asked")
        self._asked = False
        if not said.name:
            return  # what it had was dropped meanwhile
        prompt = self._waiting.pop(said.name, None)
        if prompt is None:
            return
        self._free_pages += prompt.pages
        if not said.layers:
            self._engine_runs(prompt)
            return
        if said.layers >= len(self._chain) or said.hidden_bytes != len(prompt.tokens) * self._facts.row_bytes:
            raise LinkLost(f"the target gives {said} of {len(prompt.tokens)} tokens")
        hidden = rows_of_bytes(frame.data[: said.hidden_bytes], self._facts.row_dtype, self._facts.row_items)
        self._calls.enter(prompt.name, prompt.sequence.request_id)
        self._job = _Job(prompt, said.layers, hidden, frame.data[said.hidden_bytes :])
        self.helped += 1
        self.layers_saved += said.layers

    def _on_end(self) -> None:
        self._calls.release_all()
        waiting = [*self._waiting.values(), *([self._job.prompt] if self._job is not None else [])]
        self._waiting.clear()
        self._job = None
        for prompt in waiting:
            self._post(prompt, Prefill())

    def _add(self, prompt: _Prompt) -> None:
        if not prompt.result.done():
            self._waiting[prompt.name] = prompt

    def _drop(self, name: str) -> None:
        """Nobody waits for it any more; it may be done."""
        prompt = self._waiting.pop(name, None)
        if prompt is not None and prompt.offered:
            self._free_pages += prompt.pages
            self._wire.push(pack(Drop(name)))
        if self._job is not None and self._job.prompt.name == name:
            self._finish_job()

    def _vacate(self, name: str) -> None:
        self._occupied.discard(name)

    def _take(self) -> None:
        """The first prompt, if the source is free: of the target, or as it is where that never had it."""
        if self._asked or self._occupied or not self._waiting:
            return
        first = next(iter(self._waiting.values()))
        if first.offered:
            self._asked = True
            self._wire.push(pack(Take()))
        else:
            del self._waiting[first.name]
            self._engine_runs(first)

    def _engine_runs(self, prompt: _Prompt) -> None:
        self._occupied.add(prompt.name)
        self._post(prompt, Prefill(occupies=True))

    def _offer(self) -> None:
        """Let the target have prompts, in order, as long as its pages last."""
        for prompt in self._waiting.values():
            if prompt.offered:
                continue
            if prompt.pages > self._free_pages:
                return
            prompt.offered = True
            self._free_pages -= prompt.pages
            ids = torch.tensor(prompt.tokens, dtype=torch.int64)
            offer = Offer(prompt.name, prompt.sequence.request_id, len(prompt.tokens))
            self._wire.push(pack(offer), ids.view(torch.uint8).numpy().data)

    def _run_part(self, job: _Job) -> None:
        """Run the next tokens of a prompt through the layers that are left."""
        prompt, chain = job.prompt, self._chain
        total = len(prompt.tokens)
        part = Part(name=prompt.name, start=job.done, count=min(CHUNK_TOKENS, total - job.done), total=total)

        def run() -> None:
            rows = job.hidden[part.start : part.start + part.count]
            for layer in range(job.layers, len(chain)):
                rows = chain.run(layer, part, rows)
            settle(rows)

        try:
            self._calls.metered(run, [(prompt.name, part.count)])
        except EngineError:  # the engine may yet have room for it
            self._finish_job()
            self._engine_runs(prompt)
            return
        job.done += part.count
        if job.done == total:
            own = chain.slices(prompt.name, job.layers, len(chain))
            self._finish_job()
            self._post(prompt, Prefill(kv=(_slice_of(job, own), *own)))

    def _finish_job(self) -> None:
        assert self._job is not None
        name = self._job.prompt.name
        self._job = None
        self._chain.forget(name)
        self._calls.release(name)


def _slice_of(job: _Job, own: Sequence[KvSlice]) -> KvSlice:
    """What the target gave; each layer's K and V are as large as those of a layer here. Raises LinkLost."""
    shape, dtype = own[0].data.shape, own[0].data.dtype
    if len(job.kv) != job.layers * own[0].nbytes:
        raise LinkLost(f"{len(job.kv)} bytes of K and V came for {job.layers} layers")
    data = torch.frombuffer(job.kv, dtype=dtype).view(job.layers, *shape[1:])
    return KvSlice(first=0, last=job.layers, data=data)
