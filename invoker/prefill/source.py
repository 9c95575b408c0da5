"""The source of a pair: an overloaded instance, whose prompts a loading node (the target) prefills in part.

Waiting prompts are offered to the target, which runs their first layers, one layer at a time, as far as it
has loaded them. When the source is free it requests the oldest prompt with the target's hidden states and K
and V, runs the other layers, and hands the sequence with all K and V to the instance's engine. The engine
samples all tokens and always runs a prompt's last token, so a lost target costs only its work.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import torch

from invoker.base.errors import NoSuchInstance, NoSuchPipeline
from invoker.engine.contract import EngineCall, EngineError, NewSequence, TokenOutput
from invoker.engine.kv.cache import pages_for
from invoker.engine.kv.slices import KvSlice
from invoker.engine.stage_contract import rows_from_bytes
from invoker.instances.instance import Instance
from invoker.links.framing import LinkFrame, LinkLost
from invoker.pipeline.driver import moved_output
from invoker.pipeline.metered import StepCalls
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
from invoker.prefill.layers import CHUNK_TOKENS, LayerChain, PromptChunk, synchronize


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPrompt:
    """The outcome of a prefill by the pair: `kv` for the engine, or `moved`.

    Without K and V the engine runs the whole prompt, and `occupies` the source meanwhile.
    """

    kv: tuple[KvSlice, ...] = ()
    occupies: bool = False
    moved: bool = False


@dataclass(eq=False, slots=True)
class _OfferedPrompt:
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
    """A prompt that the target has run through `layers` layers, with its hidden states and K and V."""

    prompt: _OfferedPrompt
    layers: int
    hidden: torch.Tensor
    kv: memoryview
    done: int = 0  # tokens


class PairDriver(WireThread[PairMessage]):
    """The source's thread, running from its construction.

    It has PipelineDriver's interface, but moves only requests whose prompts wait; those in the engine stay.
    `target_pages` is the number of KV pages in each of the target's layers.
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
        super().__init__(before, behind, pair_reader(), name=name)
        self._instance = instance
        self._chain = chain
        self._facts = chain.facts
        self._calls = calls
        self._free_pages = target_pages
        self._prompts: set[_OfferedPrompt] = set()  # the loop's: those that wait for their Prefill
        self._running = 0  # the loop's: streams
        self._refusal: Exception | None = None  # the loop's: why new requests are refused
        self._names = 0
        self._waiting: dict[str, _OfferedPrompt] = {}  # the thread's from here on, oldest first
        self._requested = False  # a prompt has been requested from the target
        self._occupied: set[str] = set()  # prompts run by the engine
        self._job: _Job | None = None
        self.prefilled_prompts = 0  # in part, by the target
        self.prefilled_layers = 0  # of all prompts, by the target
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

        A moved one ends with finish reason MOVED, no token.
        """
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

    def move(self, request_ids: Iterable[str] = ()) -> None:
        """Move these requests if their prompts wait; if none are named, move all waiting, refuse new ones."""
        wanted = frozenset(request_ids)
        if not wanted:
            self._refusal = self._refusal or NoSuchPipeline("the pair ends")
        for prompt in [one for one in self._prompts if not wanted or one.sequence.request_id in wanted]:
            self._resolve(prompt, PairPrompt(moved=True))

    async def aclose(self) -> None:
        """Move waiting requests and end the pair after the current step; the engine keeps its own.

        Idempotent.
        """
        self.move()
        await super().aclose()

    def fail(self, reason: Exception) -> None:
        """Refuse new requests with `reason`, after the pair has failed; the engine runs the waiting ones."""
        self._refusal = reason
        for prompt in tuple(self._prompts):
            self._resolve(prompt, PairPrompt())

    # On the event loop.

    def _prompt(self, sequence: NewSequence) -> _OfferedPrompt:
        self._names += 1
        tokens = [*sequence.prompt_ids, *sequence.generated_ids][:-1]
        future: asyncio.Future[PairPrompt] = asyncio.get_running_loop().create_future()
        return _OfferedPrompt(str(self._names), sequence, tokens, future)

    async def _prefilled(self, prompt: _OfferedPrompt) -> PairPrompt:
        if not prompt.tokens or len(prompt.tokens) > MAX_TOKENS:
            return PairPrompt()
        self._prompts.add(prompt)
        self._submit(partial(self._add, prompt))
        found: PairPrompt | None = None
        try:
            found = await prompt.result
            return found
        finally:
            self._prompts.discard(prompt)
            self._submit(partial(self._drop, prompt.name))
            if found is None or not found.occupies:  # the thread may have marked it as occupied meanwhile
                self._submit(partial(self._vacate, prompt.name))

    async def _run(
        self, prompt: _OfferedPrompt, found: PairPrompt, call: EngineCall
    ) -> AsyncGenerator[TokenOutput, None]:
        """Run a request on the instance's engine. Raises NodeDraining, NoSuchInstance, EngineError."""
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

    def _resolve(self, prompt: _OfferedPrompt, found: PairPrompt) -> None:
        if not prompt.result.done():
            prompt.result.set_result(found)

    # On the thread.

    def _post(self, prompt: _OfferedPrompt, found: PairPrompt) -> None:
        self._call_loop(self._resolve, prompt, found)

    def _on_idle(self) -> bool:
        self._on_wake()
        if self._job is None:
            self._take_next()
        self._offer()
        if self._job is not None:
            self._run_chunk(self._job)
        return self._job is not None

    def _on_frame(self, frame: LinkFrame[PairMessage]) -> None:
        message = frame.message
        if not isinstance(message, PromptHandover) or not self._requested:
            raise LinkLost(f"unexpected message from the target: {type(message).__name__}")
        self._requested = False
        if not message.name:
            return  # dropped meanwhile
        prompt = self._waiting.pop(message.name, None)
        if prompt is None:
            return
        self._free_pages += prompt.pages
        if not message.layers:
            self._run_in_engine(prompt)
            return
        if (
            message.layers >= len(self._chain)
            or message.hidden_bytes != len(prompt.tokens) * self._facts.row_bytes
        ):
            raise LinkLost(f"invalid handover from the target: {message} of {len(prompt.tokens)} tokens")
        hidden = rows_from_bytes(
            frame.payload[: message.hidden_bytes], self._facts.row_dtype, self._facts.row_items
        )
        self._calls.enter(prompt.name, prompt.sequence.request_id)
        self._job = _Job(prompt, message.layers, hidden, frame.payload[message.hidden_bytes :])
        self.prefilled_prompts += 1
        self.prefilled_layers += message.layers

    def _on_end(self) -> None:
        self._calls.release_all()
        waiting = [*self._waiting.values(), *([self._job.prompt] if self._job is not None else [])]
        self._waiting.clear()
        self._job = None
        for prompt in waiting:
            self._post(prompt, PairPrompt())

    def _add(self, prompt: _OfferedPrompt) -> None:
        if not prompt.result.done():
            self._waiting[prompt.name] = prompt

    def _drop(self, name: str) -> None:
        """Forget a prompt that has its result or was cancelled."""
        prompt = self._waiting.pop(name, None)
        if prompt is not None and prompt.offered:
            self._free_pages += prompt.pages
            self._wire.send(encode(PromptDrop(name)))
        if self._job is not None and self._job.prompt.name == name:
            self._finish_job()

    def _vacate(self, name: str) -> None:
        self._occupied.discard(name)

    def _take_next(self) -> None:
        """Start the oldest prompt if the source is free: request it from the target if it was offered."""
        if self._requested or self._occupied or not self._waiting:
            return
        first = next(iter(self._waiting.values()))
        if first.offered:
            self._requested = True
            self._wire.send(encode(PromptRequest()))
        else:
            del self._waiting[first.name]
            self._run_in_engine(first)

    def _run_in_engine(self, prompt: _OfferedPrompt) -> None:
        self._occupied.add(prompt.name)
        self._post(prompt, PairPrompt(occupies=True))

    def _offer(self) -> None:
        """Offer prompts to the target, in order, while it has free pages."""
        for prompt in self._waiting.values():
            if prompt.offered:
                continue
            if prompt.pages > self._free_pages:
                return
            prompt.offered = True
            self._free_pages -= prompt.pages
            ids = torch.tensor(prompt.tokens, dtype=torch.int64)
            offer = PromptOffer(prompt.name, prompt.sequence.request_id, len(prompt.tokens))
            self._wire.send(encode(offer), ids.view(torch.uint8).numpy().data)

    def _run_chunk(self, job: _Job) -> None:
        """Run the next tokens of a prompt through the other layers."""
        prompt, chain = job.prompt, self._chain
        total = len(prompt.tokens)
        chunk = PromptChunk(
            name=prompt.name, start=job.done, count=min(CHUNK_TOKENS, total - job.done), total=total
        )

        def run() -> None:
            rows = job.hidden[chunk.start : chunk.start + chunk.count]
            for layer in range(job.layers, len(chain)):
                rows = chain.run(layer, chunk, rows)
            synchronize(rows)

        try:
            self._calls.metered(run, [(prompt.name, chunk.count)])
        except EngineError:  # the engine may have room for it
            self._finish_job()
            self._run_in_engine(prompt)
            return
        job.done += chunk.count
        if job.done == total:
            own = chain.slices(prompt.name, job.layers, len(chain))
            self._finish_job()
            self._post(prompt, PairPrompt(kv=(_slice_of(job, own), *own)))

    def _finish_job(self) -> None:
        assert self._job is not None
        name = self._job.prompt.name
        self._job = None
        self._chain.drop(name)
        self._calls.release(name)


def _slice_of(job: _Job, own: Sequence[KvSlice]) -> KvSlice:
    """Return the target's K and V as a slice; layers are as large as those here. Raises LinkLost."""
    shape, dtype = own[0].data.shape, own[0].data.dtype
    if len(job.kv) != job.layers * own[0].nbytes:
        raise LinkLost(f"received {len(job.kv)} bytes of K and V for {job.layers} layers")
    data = torch.frombuffer(job.kv, dtype=dtype).view(job.layers, *shape[1:])
    return KvSlice(first=0, last=job.layers, data=data)
