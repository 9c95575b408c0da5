"""The thread of a pair's source: which prompt it takes next, and the layers that the target has not run."""

import logging
import socket
from dataclasses import replace
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
from invoker.prefill.layers import CHUNK_TOKENS, FAULTS, LayerChain, LayerRun, LoadedLayers, PromptChunk
from invoker.prefill.prompts import PairPrompt, PrefillJob, WaitingPrompt, received_slice

log = logging.getLogger("invoker.stages")


class SourceState(Enum):
    """What the source does; it takes the oldest prompts while it is FREE.

    LOADING ends when the instance is ready, each other state in FREE.
    """

    LOADING = auto()  # it has no engine yet
    FREE = auto()
    REQUESTED = auto()  # it waits for a prompt of the target
    OCCUPIED = auto()  # its engine runs a whole prompt, or the last tokens of a turn's, until the first token


class SourceThread(WireThread[PairMessage]):
    """The source's thread; `_add`, `_drop`, `_vacate` and `_set_ready` are submitted to it.

    It takes turns with the engine, which decodes between two of them: a turn runs as many prompts as take
    about as long as a step of the engine.

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
        self._jobs: list[PrefillJob] = []  # taken from the target
        self._found: list[tuple[WaitingPrompt, PairPrompt]] = []  # to be handed over
        self.prefilled_prompts = 0  # handed to the engine with K and V

    def _on_idle(self) -> bool:
        self._on_wake()
        self._take_next()
        self._offer()
        if self._jobs and self._state is SourceState.FREE:
            self._run_turn()
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
        waiting = [*self._waiting.values(), *(job.prompt for job in self._jobs)]
        self._waiting.clear()
        self._jobs.clear()
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
        for job in [job for job in self._jobs if job.prompt.name == name]:
            self._finish_job(job)

    def _take_next(self) -> None:
        """Take the oldest prompts for a turn if the source is free, from the target if they were offered.

        A node that is its own target leaves none to it: all that have not started run in the engine together.
        """
        while self._waiting and self._state is SourceState.FREE and self._turn_tokens < CHUNK_TOKENS:
            first = next(iter(self._waiting.values()))
            if self._jobs and not (first.offered and self._has_room(first)):
                return
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
            self._jobs.append(job)
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

    @property
    def _turn_tokens(self) -> float:
        """The tokens of the taken prompts, each by the share of the layers that it has left.

        At least a half: the target would have nothing left to run meanwhile.
        """
        return sum((len(job.prompt.tokens) - job.done) * self._share(job) for job in self._jobs)

    def _has_room(self, prompt: WaitingPrompt) -> bool:
        """Return whether the layers here have KV pages for another prompt of this turn."""
        return prompt.pages + sum(job.prompt.pages for job in self._jobs) <= self._chain.pages

    def _share(self, job: PrefillJob) -> float:
        return max(0.5, 1 - job.layers / len(self._chain))

    def _run_turn(self) -> None:
        """Run the taken prompts through their other layers, in parts if they are long.

        Those that are done are handed to the engine together.
        """
        turn: list[tuple[PrefillJob, PromptChunk]] = []
        left, count = float(CHUNK_TOKENS), len(self._chain)
        for job in self._jobs:
            if left <= 0:
                break
            total = len(job.prompt.tokens)
            chunk = PromptChunk.after(job.prompt.name, job.done, total)
            if job.layers == count:  # nothing is left to run
                chunk = replace(chunk, count=total - job.done)
            turn.append((job, chunk))
            left -= chunk.count * self._share(job)
        parts = [
            LayerRun(job.layers, count, chunk, job.hidden[chunk.start : chunk.start + chunk.count])
            for job, chunk in turn
            if job.layers < count
        ]
        try:
            if parts:
                self._chain.run(parts)
        except LinkLost:
            raise
        except FAULTS as error:
            for job, _ in turn:
                self._leave_to_engine(job, error)
            return
        for job, chunk in turn:
            job.done += chunk.count
            if job.done == len(job.prompt.tokens):
                self._complete(job)
        if self._found and self._own is None:
            # Their first tokens come before the next turn.
            prompt, found = self._found[-1]
            self._found[-1] = prompt, replace(found, occupies=True)
            self._state, self._occupant = SourceState.OCCUPIED, prompt.name
        self._hand_over()

    def _complete(self, job: PrefillJob) -> None:
        try:
            kv = self._slices(job)
        except LinkLost:
            raise
        except FAULTS as error:
            self._leave_to_engine(job, error)
            return
        self._finish_job(job)
        self.prefilled_prompts += 1
        self._found.append((job.prompt, PairPrompt(kv=kv)))

    def _leave_to_engine(self, job: PrefillJob, error: Exception) -> None:
        """Have the engine run a prompt, for which it may have room."""
        log.info("prompt left to the engine: %r", error)
        self._finish_job(job)
        self._run_in_engine(job.prompt)

    def _slices(self, job: PrefillJob) -> tuple[KvSlice, ...]:
        """Return K and V of all layers: the target's, and those of the chain here."""
        name, last = job.prompt.name, len(self._chain)
        if self._own is not None:
            return self._chain.slices(name, 0, last)
        own = self._chain.slices(name, job.layers, last)
        return (received_slice(job, own), *own)

    def _finish_job(self, job: PrefillJob) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        self._free_pages += job.prompt.pages
        self._chain.drop(job.prompt.name)
