"""The thread of a pair's source: which prompts its engine takes from the target, and when."""

import logging
import math
import socket
from dataclasses import dataclass
from enum import Enum, auto

import torch

from invoker.engine.engine_load import EngineLoad
from invoker.engine.kv.entry import EntryFormat, LayerEntry
from invoker.engine.scheduling.sequence_table import InvalidSequence
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
from invoker.prefill.layers import FAULTS, LoadedLayers, TakenPrompt
from invoker.prefill.prompts import PairPrompt, WaitingPrompt

log = logging.getLogger("invoker.stages")

_TAKEN_STEPS = 1.5  # whose prompts the engine has: the step that starts, and a part of the next one
# The least part of a prompt that counts: the target would have nothing left to run meanwhile.
_LEAST_SHARE = 0.5


class SourceState(Enum):
    """What the source does. LOADING ends when the instance is ready."""

    LOADING = auto()  # it has no engine yet
    FREE = auto()
    REQUESTED = auto()  # it waits for a prompt of the target


@dataclass(slots=True, kw_only=True)
class TakenTokens:
    """The prompt tokens of a sequence that the engine has left to run, by their share of layers.

    They count `weight` times.
    """

    request_id: str
    left: int
    weight: float


class SourceThread(WireThread[PairMessage]):
    """The source's thread; `_add`, `_drop`, `_on_step`, `_on_first_token`, `_set_ready` are submitted to it.

    The oldest prompts go to the engine as it runs those before: with what the target made of them, or whole
    if they were not offered to it. The engine's steps run them through their other layers beside the
    sequences that decode.

    `pages` is the number of KV pages in each of the target's layers, `longest` the most tokens of a sequence.
    A node that is its own target has it as `own`, else `entries` is the format of what the target sends.
    `load` is that of the engine, if it is there.
    """

    def __init__(
        self,
        before: socket.socket,
        behind: socket.socket,
        *,
        pages: int,
        longest: int,
        name: str,
        entries: EntryFormat | None = None,
        own: LoadedLayers | None = None,
        load: EngineLoad | None = None,
    ) -> None:
        assert (entries is None) != (own is None)
        super().__init__(before, behind, pair_reader(), name=name)
        self._entries = entries
        self._own = own
        self._longest = longest
        self._free_pages = pages
        self._waiting: dict[str, WaitingPrompt] = {}  # oldest first
        self._state = SourceState.FREE if own is None else SourceState.LOADING
        self._load = load
        self._taken: dict[str, TakenTokens] = {}  # of prompts that the engine has to run
        self._others = 0 if load is None else load.queued_prompt_tokens  # that it has besides
        self.prefilled_prompts = 0  # handed to the engine behind some layers

    def _on_idle(self) -> bool:
        self._on_wake()
        self._take_next()
        self._offer()
        return self._own is not None and self._own.run_chunk()

    def _on_frame(self, frame: LinkFrame[PairMessage]) -> None:
        message = frame.message
        if not isinstance(message, PromptHandover) or self._state is not SourceState.REQUESTED:
            raise LinkLost(f"unexpected message from the target: {type(message).__name__}")
        self._state = SourceState.FREE
        prompt = self._waiting.get(message.name)
        if prompt is None:
            return  # dropped meanwhile
        hidden, kv = frame.payload[: message.hidden_bytes], frame.payload[message.hidden_bytes :]
        assert self._entries is not None
        try:
            entry = None
            if message.layers or frame.payload:
                entry = self._entries.parse(message.layers, len(prompt.tokens), hidden, kv)
        except InvalidSequence as error:
            raise LinkLost(f"invalid handover from the target: {error}") from error
        self._start(prompt, PairPrompt(entry=entry))
        self._take_next()

    def _on_end(self) -> None:
        if self._own is not None:
            self._own.chain.release_calls()
        waiting = tuple(self._waiting.values())
        self._waiting.clear()
        if self._state is not SourceState.LOADING:  # else `fail` resolves them
            for prompt in waiting:
                self._call_loop(prompt.resolve, PairPrompt())

    def _set_ready(self) -> None:
        self._state = SourceState.FREE

    def _on_step(self) -> None:
        """Record what the engine has left to run after a step."""
        assert self._load is not None
        ours = 0
        for taken in self._taken.values():
            left = self._load.left(taken.request_id)
            if left is not None:  # else it has not arrived there yet
                taken.left = left
                ours += left
        self._others = max(0, self._load.queued_prompt_tokens - ours)

    def _on_first_token(self, name: str) -> None:
        """Record that the engine has run a prompt, or has dropped it."""
        self._taken.pop(name, None)

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

    def _take_next(self) -> None:
        """Take the oldest prompts that the engine can run soon, from the target if they were offered.

        A node that is its own target leaves none to it.
        """
        while self._waiting and self._state is SourceState.FREE and self._has_room():
            first = next(iter(self._waiting.values()))
            if not first.offered:
                self._start(first, PairPrompt())
            elif self._own is None:
                self._state = SourceState.REQUESTED
                self._wire.send(encode(PromptRequest()))
            elif (taken := self._own.take()) is not None:
                self._start(self._waiting[taken.name], self._made(self._own, taken))
            else:
                return

    def _has_room(self) -> bool:
        if self._entries is None:
            return True
        queued = self._others + sum(one.left * one.weight for one in self._taken.values())
        return queued < _TAKEN_STEPS * self._entries.step_tokens

    def _start(self, prompt: WaitingPrompt, found: PairPrompt) -> None:
        """Hand a prompt to the engine."""
        del self._waiting[prompt.name]
        if prompt.offered:
            self._free_pages += prompt.pages
        share = 1.0
        if found.entry is not None and self._entries is not None:
            share = self._entries.share(found.entry)
        self._taken[prompt.name] = TakenTokens(
            request_id=prompt.sequence.request_id,
            left=math.ceil(len(prompt.tokens) * share),
            weight=max(1.0, _LEAST_SHARE / share),
        )
        self.prefilled_prompts += found.entry is not None or bool(found.kv)
        self._call_loop(prompt.resolve, found)

    def _made(self, own: LoadedLayers, taken: TakenPrompt) -> PairPrompt:
        """Return what this node made of a prompt as its own target; nothing if there is no memory for it."""
        try:
            if not taken.layers:
                return PairPrompt()
            kv = own.chain.kv(taken.name, taken.layers)
        except FAULTS as error:
            log.info("prompt left to the engine: %r", error)
            return PairPrompt()
        finally:
            own.chain.drop(taken.name)
        if taken.layers == own.layers:
            return PairPrompt(kv=(kv,))
        return PairPrompt(entry=LayerEntry(rows=taken.rows, kv=kv))

    def _offer(self) -> None:
        """Offer prompts to the target, in order, while it has free pages."""
        for prompt in self._waiting.values():
            tokens = len(prompt.tokens)
            if prompt.offered or not 1 < tokens < min(MAX_TOKENS + 1, self._longest):
                continue
            if prompt.pages > self._free_pages:
                return
            prompt.offered = True
            self._free_pages -= prompt.pages
            ids, sequence = torch.tensor(prompt.tokens, dtype=torch.int64), prompt.sequence
            call, trace = sequence.request_id, sequence.trace
            if self._own is not None:
                self._own.add(prompt.name, call, ids, trace)
            else:
                offer = PromptOffer(prompt.name, call, tokens, trace)
                self._wire.send(encode(offer), ids.view(torch.uint8).numpy().data)
