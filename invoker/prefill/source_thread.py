"""The thread of a pair's source: which prompt it takes next, and the layers that the target has not run."""

import logging
import socket
from enum import Enum, auto

import torch

from invoker.engine.kv.slices import KvSlice
from invoker.engine.stage_contract import rows_from_bytes
from invoker.links.framing import LinkFrame, LinkLost
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
from invoker.prefill.prompts import PairPrompt, PrefillJob, WaitingPrompt, received_slice

log = logging.getLogger("invoker.stages")


class SourceState(Enum):
    """What the source does; it takes the oldest prompt while it is FREE.

    LOADING ends when the instance is ready, each other state in FREE.
    """

    LOADING = auto()  # it has no engine yet
    FREE = auto()
    REQUESTED = auto()  # it waits for a prompt of the target
    RUNNING = auto()  # it runs the layers that the target has not run
    OCCUPIED = auto()  # its engine runs a whole prompt, until the first token


class SourceThread(WireThread[PairMessage]):
    """The source's thread; `_add`, `_drop`, `_vacate` and `_set_ready` are submitted to it.

    `pages` is the number of KV pages in each of the target's layers. A node that is its own target has it as
    `own`, whose chain is the source's too.
    """

    def __init__(
        self,
        chain: LayerChain,
        before: socket.socket,
        behind: socket.socket,
        *,
        pages: int,
        name: str,
        own: LoadedLayers | None = None,
    ) -> None:
        super().__init__(before, behind, pair_reader(), name=name)
        self._chain = chain
        self._facts = chain.facts
        self._own = own
        self._free_pages = pages
        self._waiting: dict[str, WaitingPrompt] = {}  # oldest first
        self._state = SourceState.FREE if own is None else SourceState.LOADING
        self._occupant = ""  # the prompt that the engine runs, if OCCUPIED
        self._job: PrefillJob | None = None  # if RUNNING
        self._found: list[tuple[WaitingPrompt, PairPrompt]] = []  # to be handed over
        self.prefilled_prompts = 0  # handed to the engine with K and V

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
        if not isinstance(message, PromptHandover) or self._state is not SourceState.REQUESTED:
            raise LinkLost(f"unexpected message from the target: {type(message).__name__}")
        self._state = SourceState.FREE
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
        if self._state is not SourceState.LOADING:  # else `fail` resolves them
            self._found += [(prompt, PairPrompt()) for prompt in waiting]
        self._hand_over()

    def _hand_over(self) -> None:
        """Hand prompts to the engine together, so that their first tokens are of one step."""
        found, self._found = self._found, []
        for prompt, one in found:
            self._call_loop(prompt.resolve, one)

    def _set_ready(self) -> None:
        self._state = SourceState.FREE

    def _vacate(self, name: str) -> None:
        if self._state is SourceState.OCCUPIED and self._occupant == name:
            self._state = SourceState.FREE

    def _add(self, prompt: WaitingPrompt) -> None:
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
        while self._waiting and self._state is SourceState.FREE:
            first = next(iter(self._waiting.values()))
            if not first.offered:
                self._run_in_engine(self._waiting.pop(first.name))
            elif self._own is None:
                self._state = SourceState.REQUESTED
                self._wire.send(encode(PromptRequest()))
            elif (taken := self._own.take()) is not None:
                layers = taken.layers if self._own.is_complete else 0
                self._start(taken.name, layers, taken.rows, memoryview(b""))
            else:
                return

    def _start(self, name: str, layers: int, hidden: torch.Tensor, kv: memoryview) -> None:
        """Start a prompt after the layers that the target has run."""
        prompt = self._waiting.pop(name)
        job = PrefillJob(prompt, layers, hidden, kv)
        if layers:
            self._chain.enter(name, prompt.sequence.request_id)
            self._job, self._state = job, SourceState.RUNNING
        else:
            self._finish_job(job)
            self._run_in_engine(prompt)

    def _run_in_engine(self, prompt: WaitingPrompt) -> None:
        occupies = self._own is None
        if occupies:
            self._state, self._occupant = SourceState.OCCUPIED, prompt.name
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

    def _run_chunk(self, job: PrefillJob) -> None:
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

    def _slices(self, job: PrefillJob) -> tuple[KvSlice, ...]:
        """Return K and V of all layers: the target's, and those of the chain here."""
        name, last = job.prompt.name, len(self._chain)
        if self._own is not None:
            return self._chain.slices(name, 0, last)
        own = self._chain.slices(name, job.layers, last)
        return (received_slice(job, own), *own)

    def _finish_job(self, job: PrefillJob) -> None:
        self._job, self._state = None, SourceState.FREE
        self._free_pages += job.prompt.pages
        self._chain.drop(job.prompt.name)
