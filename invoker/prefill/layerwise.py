"""A node that loads alone runs the prompts that wait there through its layers, one by one as they land.

So when it is ready its own engine, which draws all tokens, goes on from their K and V: of what a prompt takes
only the last layers are left. Its last token is always left to the engine. A prompt for which there was no
room, or that came late, is simply the engine's.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import torch

from invoker.engine.contract import EngineCall, EngineError, NewSequence, TokenOutput
from invoker.engine.kv_cache import pages_for
from invoker.engine.kv_slices import KvSlice
from invoker.engine.stage_contract import Stage
from invoker.errors import NoSuchInstance, NoSuchPipeline, PipelineLost
from invoker.instance import Instance
from invoker.stages.driver import moved_output
from invoker.stages.metered import StepCalls
from invoker.stages.zigzag_layers import CHUNK_TOKENS, LayerChain, Part, settle
from invoker.threads import in_thread
from registry.instance import InstanceState
from registry.zigzag import Batch, ZigZagQueue

_HAND_OVER_S = 5.0  # for what has been begun when the instance is ready: few layers of few prompts are left
# For the rest of the load: whoever waits for longer had better take what is ready sooner, and be told how far
# starts are meanwhile.
PATIENCE_S = 60.0
_FAULTS = (EngineError, RuntimeError, MemoryError)  # a step's, or of copies that find no room

log = logging.getLogger("invoker.stages")


class Layers(Protocol):
    """A LayerMaker is one: it makes the layers' stages, whose steps are run for `calls`."""

    layers: int

    def calls(self) -> StepCalls: ...

    async def make(self, layer: int) -> Stage: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a prompt comes to the engine: with `kv`, or to be run there; or the call is to go on elsewhere."""

    kv: tuple[KvSlice, ...] = ()
    moved: bool = False


@dataclass(eq=False, slots=True)
class _Prompt:
    """A sequence whose prompt waits. `tokens` are all but the last; `rows` is what the next layer takes, once
    there is room for its K and V."""

    name: str
    sequence: NewSequence
    tokens: list[int]
    result: "asyncio.Future[Ran]"
    rows: torch.Tensor | None = None
    kv: tuple[KvSlice, ...] = ()  # in the end
    layers: int = 0  # that have run
    refused: bool = False  # by a layer's engine, or as longer than any that it takes

    @property
    def pages(self) -> int:
        return pages_for(len(self.tokens))


class LoneDriver:
    """At work from when it is made, on the loop but for the layers' steps, of which one runs at a time. As
    PipelineDriver it takes calls and moves them, but only those whose prompts wait here. `first` is the first
    layer's stage; the maker brings the others. Where the instance is not ready after `patience_s` it ends by
    itself, and what waits is moved."""

    def __init__(
        self,
        instance: Instance,
        maker: Layers,
        first: Stage,
        *,
        name: str,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._instance = instance
        self._longest = first.facts.longest
        self._patience_s = patience_s
        self._maker = maker
        self._chain = LayerChain([first])
        self._queue = ZigZagQueue(maker.layers)
        self._queue.loaded(1)
        self._calls = maker.calls()
        self._free_pages = first.pages
        self._prompts: dict[str, _Prompt] = {}  # the earliest first
        self._left: list[_Prompt] = []  # of which the layers may have something still
        self._is_ready = False
        self._refusal: Exception | None = None  # why nothing new is taken
        self._names = 0
        self._streams = 0
        self._bell = asyncio.Event()
        self._emptied = asyncio.Event()
        self.failure: Exception | None = None
        self.helped = 0  # prompts that came to the engine with K and V
        self._tasks = [
            asyncio.create_task(self._told(self._wait), name=f"{name} grows"),
            asyncio.create_task(self._told(self._work), name=name),
        ]

    def __repr__(self) -> str:
        return f"<LoneDriver {self._queue!r}, {self._streams} streams, {self.helped} helped with>"

    @property
    def streams(self) -> int:
        """How many are under way."""
        return self._streams

    async def generate(self, sequence: NewSequence, call: EngineCall) -> AsyncGenerator[TokenOutput, None]:
        """As EngineRunner.generate; one that is moved ends with the finish reason MOVED, and no token."""
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
                    del found  # the engine lets go of the K and V when it has them
                    async for output in outputs:
                        yield output
        except NoSuchInstance as error:  # layers have run for it here
            raise PipelineLost(str(error)) from error
        finally:
            self._streams -= 1

    def leave(self, request_ids: Iterable[str] = ()) -> None:
        """Move these calls, if their prompts wait; if none are named, all such, and nothing new is taken."""
        wanted = frozenset(request_ids)
        if not wanted:
            self._refusal = self._refusal or NoSuchPipeline("the pipeline ends")
        for prompt in tuple(self._prompts.values()):
            if not wanted or prompt.sequence.request_id in wanted:
                _tell(prompt, Ran(moved=True))

    async def aclose(self) -> None:
        """End it: what is nearly done where the instance is ready is given to its engine, all else is moved.
        Idempotent."""
        self._refusal = self._refusal or NoSuchPipeline("the pipeline ends")
        if self._instance.state is InstanceState.READY and self._prompts and not self._tasks[1].done():
            emptied = asyncio.create_task(self._emptied.wait())
            await asyncio.wait(
                [emptied, self._tasks[1]], timeout=_HAND_OVER_S, return_when=asyncio.FIRST_COMPLETED
            )
            emptied.cancel()
        self.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._calls.release_all()

    def end(self, reason: Exception) -> None:
        """It has ended by itself: nothing new comes here, and what waits ends with the reason."""
        self._refusal = reason
        for prompt in tuple(self._prompts.values()):
            if not prompt.result.done():
                prompt.result.set_exception(reason)

    async def wait_closed(self) -> None:
        """Return once it has ended."""
        await asyncio.wait(self._tasks[1:])

    # --- inside

    async def _prefilled(self, sequence: NewSequence) -> Ran:
        tokens = [*sequence.prompt_ids, *sequence.generated_ids][:-1]
        if self._is_ready or self._tasks[1].done():
            return Ran()
        self._names += 1
        result: asyncio.Future[Ran] = asyncio.get_running_loop().create_future()
        prompt = _Prompt(str(self._names), sequence, tokens, result, refused=len(tokens) >= self._longest)
        self._prompts[prompt.name] = prompt
        self._emptied.clear()
        self._bell.set()
        try:
            return await result
        finally:
            del self._prompts[prompt.name]
            self._queue.drop(prompt.name)
            if prompt.rows is not None:
                self._left.append(prompt)
            if not self._prompts:
                self._emptied.set()
            self._bell.set()

    def _engine(
        self, sequence: NewSequence, call: EngineCall, found: Ran
    ) -> AsyncGenerator[TokenOutput, None]:
        """By the instance's own. Raises NoSuchInstance."""
        runner = self._instance.runner
        if runner is None:
            raise NoSuchInstance(f"instance {self._instance.id} has ended")
        return runner.generate(sequence, call, found.kv)

    async def _told(self, work: Callable[[], Awaitable[None]]) -> None:
        """Who waits for the end is told what it failed by."""
        try:
            await work()
        except Exception as error:  # whatever it is: kept as `failure`, and all ends with it
            log.exception("a node that loads alone failed")
            self.failure = error.with_traceback(None)
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()

    async def _wait(self) -> None:
        """Take layers until the instance is ready, or for as long as it makes sense to wait for that."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._grow()
        except TimeoutError:
            self.leave()
            self.failure = PipelineLost(f"it is not ready after {self._patience_s:g} s")
            self._tasks[1].cancel()

    async def _grow(self) -> None:
        """Take each layer as it lands, and tell when the instance is ready."""
        try:
            for layer in range(1, self._maker.layers):
                self._chain.append(await self._maker.make(layer))
                self._queue.loaded(layer + 1)
                self._bell.set()
        except (NoSuchInstance, *_FAULTS) as error:  # what waits is the engine's, once it is ready
            log.info("%s runs no more layers before it is ready: %r", self._instance.id, error)
        await self._instance.settled()
        self._is_ready = self._instance.state is InstanceState.READY
        self._bell.set()

    async def _work(self) -> None:
        while True:
            self._bell.clear()
            await self._forget_left()
            self._admit()
            if self._is_ready:
                await self._hand_over()
            if not await self._run_next():
                await self._bell.wait()

    def _admit(self) -> None:
        """Begin with prompts, in order, while there is room for their K and V."""
        for prompt in () if self._is_ready else tuple(self._prompts.values()):
            if prompt.rows is None and not prompt.refused and 0 < prompt.pages <= self._free_pages:
                self._free_pages -= prompt.pages
                prompt.rows = torch.tensor(prompt.tokens, dtype=torch.int64)
                self._calls.enter(prompt.name, prompt.sequence.request_id)
                self._queue.add(Batch(name=prompt.name, tokens=len(prompt.tokens)))

    async def _hand_over(self) -> None:
        """Once the instance is ready its engine gets all prompts: those that were begun with K and V, after a
        single step for all their layers that are left, and the others as they are."""
        waiting = [prompt for prompt in self._prompts.values() if not prompt.result.done()]
        begun = [prompt for prompt in waiting if prompt.layers]
        for prompt in waiting:
            self._queue.drop(prompt.name)
        if begun and len(self._chain) == self._maker.layers:
            try:
                await in_thread(self._finish, begun)
            except _FAULTS as error:
                log.info("prompts are the engine's, as their last layers cannot be run: %s", error)
        for prompt in waiting:
            if not prompt.result.done():
                self.helped += bool(prompt.kv)
                prompt.result.set_result(Ran(kv=prompt.kv))

    def _finish(self, prompts: Sequence[_Prompt]) -> None:
        """In a thread."""
        layers = self._maker.layers

        def run() -> None:
            for prompt in prompts:
                for layer in range(prompt.layers, layers):
                    self._run(prompt, layer)

        left = [(prompt.name, len(prompt.tokens) * (layers - prompt.layers)) for prompt in prompts]
        if any(tokens for _, tokens in left):
            self._calls.metered(run, left)
        for prompt in prompts:
            prompt.kv = self._chain.slices(prompt.name, 0, layers)

    async def _run_next(self) -> bool:
        """Run the next layer of the earliest prompt that has one; False if there is none."""
        work = self._queue.for_target()
        if work is None:
            return False
        prompt, layer = self._prompts[work.batch.name], work.first
        ran = [(prompt.name, len(prompt.tokens))]
        try:
            await in_thread(self._calls.metered, lambda: self._run(prompt, layer), ran)
        except _FAULTS as error:
            log.info("a prompt is the engine's, as layer %d cannot be run: %s", layer, error)
            self._queue.drop(prompt.name)
            prompt.layers, prompt.refused = 0, True
        else:
            self._queue.ran(work)
        return True

    def _run(self, prompt: _Prompt, layer: int) -> None:
        """In a thread."""
        rows, made, total = prompt.rows, list[torch.Tensor](), len(prompt.tokens)
        assert rows is not None
        for start in range(0, total, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, total - start)
            part = Part(name=prompt.name, start=start, count=count, total=total)
            made.append(settle(self._chain.run(layer, part, rows[start : start + count])))
        prompt.rows, prompt.layers = torch.cat(made) if len(made) > 1 else made[0], layer + 1

    async def _forget_left(self) -> None:
        """Free what the layers have of prompts that are not here any more."""
        while self._left:
            prompt = self._left.pop()
            await in_thread(self._chain.forget, prompt.name)
            self._calls.release(prompt.name)
            self._free_pages += prompt.pages


def _tell(prompt: _Prompt, found: Ran) -> None:
    if not prompt.result.done():
        prompt.result.set_result(found)
