"""Single-layer stages that run prompt chunks, and the prompts that wait for a node's loaded layers."""

import logging
from dataclasses import dataclass, field

import torch

from invoker.engine.contract import EngineError
from invoker.engine.kv.slices import KvSlice
from invoker.engine.stage_contract import (
    OpenSequence,
    Stage,
    StageChunk,
    StageInput,
    StageOutput,
    StageStep,
)
from invoker.pipeline.metered import StepCalls
from invoker.prefill.zigzag_queue import LayerWork, PromptBatch, ZigZagQueue
from registry.messages.sampling import Sampling
from registry.messages.trace import TraceContext

CHUNK_TOKENS = 2048  # prompt tokens of a step of one layer
FAULTS = (EngineError, RuntimeError, MemoryError)  # of a step, or of a copy without room
_NO_SAMPLING = Sampling(max_tokens=1)

log = logging.getLogger("invoker.stages")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """The tokens `[start, start + count)` of a prompt of `total` tokens."""

    name: str
    start: int
    count: int
    total: int

    @classmethod
    def after(cls, name: str, done: int, total: int) -> "PromptChunk":
        """Return the chunk that follows the first `done` tokens."""
        return cls(name=name, start=done, count=min(CHUNK_TOKENS, total - done), total=total)


class LayerChain:
    """A chain of single-layer stages; K and V of a prompt stay until `drop`.

    Used by one thread; samples nothing. Steps are charged to the prompts' `calls`.
    """

    def __init__(self, calls: StepCalls) -> None:
        self._calls = calls
        self._stages: list[Stage] = []
        self._open: dict[str, set[int]] = {}  # by prompt, the layers that have K and V of it

    def __repr__(self) -> str:
        return f"<LayerChain {len(self._stages)} layers, {len(self._open)} prompts>"

    def __len__(self) -> int:
        return len(self._stages)

    def append(self, stage: Stage) -> None:
        """Add the next layer."""
        assert stage.layers == (len(self), len(self) + 1), stage
        self._stages.append(stage)

    def enter(self, name: str, call_id: str, trace: TraceContext | None = None) -> None:
        """Charge the prompt's steps to that call, until `drop`. Idempotent."""
        self._calls.enter(name, call_id, trace)

    def run(self, layer: int, chunk: PromptChunk, rows: torch.Tensor) -> torch.Tensor:
        """Run a chunk through a layer; return its output rows.

        The model's last layer returns its input. Raises EngineError.
        """

        def work() -> torch.Tensor:
            output = self._run_layer(layer, chunk, rows)
            if output.is_cuda:  # nothing else synchronizes a step without sampling
                torch.cuda.synchronize(output.device)
            return output

        return self._calls.metered(work, [(chunk.name, chunk.count)])

    def slices(self, name: str, layers: int) -> tuple[KvSlice, ...]:
        """Return copies of a prompt's K and V in the first layers, one slice per layer."""
        return tuple(stage.export_kv(name) for stage in self._stages[:layers])

    def kv(self, name: str, layers: int) -> KvSlice:
        """Return a copy of a prompt's K and V in the first layers."""
        data = torch.cat([one.data for one in self.slices(name, layers)])
        return KvSlice(first=0, last=layers, data=data)

    def drop(self, name: str) -> None:
        """Free a prompt's K and V in all layers, and release its call."""
        for layer in self._open.pop(name, ()):
            stage = self._stages[layer]
            facts = stage.facts
            rows = (
                torch.empty((0, facts.row_items), dtype=facts.row_dtype)
                if layer
                else torch.empty(0, dtype=torch.int64)
            )
            step = StageStep(number=0, closed=(name,), opened=(), chunks=())
            stage.run(StageInput(step=step, data=rows))
        self._calls.release(name)

    def release_calls(self) -> None:
        """Release the calls of all prompts."""
        self._calls.release_all()

    def _run_layer(self, layer: int, chunk: PromptChunk, rows: torch.Tensor) -> torch.Tensor:
        opened = self._open.setdefault(chunk.name, set())
        opening = OpenSequence(sequence=chunk.name, max_tokens=chunk.total, sampling=_NO_SAMPLING)
        stage_chunk = StageChunk(sequence=chunk.name, start=chunk.start, count=chunk.count, last=False)
        step = StageStep(
            number=0, closed=(), opened=() if layer in opened else (opening,), chunks=(stage_chunk,)
        )
        opened.add(layer)
        output: StageOutput = self._stages[layer].run(StageInput(step=step, data=rows))
        return rows if output.hidden is None else output.hidden


@dataclass(slots=True)
class _RunningLayer:
    """A prompt in a layer, with the output rows of its chunks so far."""

    work: LayerWork
    outputs: list[torch.Tensor] = field(default_factory=list)
    done: int = 0  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenPrompt:
    """A prompt that has run through `layers` layers; `rows` are the input of the next one."""

    name: str
    layers: int
    rows: torch.Tensor


class LoadedLayers:
    """The target of a pair: prompts that wait, and the loaded layers that run them, one layer at a time.

    Used by one thread. K and V of a taken prompt stay in `chain`.
    """

    def __init__(self, layers: int, calls: StepCalls) -> None:
        self.chain = LayerChain(calls)
        self.layers = layers  # of the model
        self._queue = ZigZagQueue(layers + 1)  # one more: a prompt stays until it is taken
        self._rows: dict[str, torch.Tensor] = {}  # each prompt's input to its next layer
        self._running: _RunningLayer | None = None

    def __repr__(self) -> str:
        return f"<LoadedLayers {self._queue!r}>"

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._queue)

    def append(self, stage: Stage) -> None:
        """Add the next layer."""
        self.chain.append(stage)
        self._queue.set_loaded_layers(len(self.chain))

    def add(self, name: str, call_id: str, ids: torch.Tensor, trace: TraceContext | None = None) -> None:
        """Queue a prompt. Raises ValueError if its name is queued already."""
        self._queue.add(PromptBatch(name=name, tokens=len(ids)))
        self.chain.enter(name, call_id, trace)
        self._rows[name] = ids

    def take(self) -> TakenPrompt | None:
        """Remove the oldest prompt; None while a layer of it is running."""
        work = self._queue.pop_for_source()
        if work is None:
            return None
        name = work.batch.name
        return TakenPrompt(name=name, layers=work.first, rows=self._rows.pop(name))

    def drop(self, name: str) -> None:
        """Remove a prompt and free its K and V."""
        if self._running is not None and self._running.work.batch.name == name:
            self._running = None
        self._queue.drop(name)
        self._rows.pop(name, None)
        self.chain.drop(name)

    def run_chunk(self) -> bool:
        """Run the next chunk of the oldest prompt with a loaded layer left; return whether there was one.

        A prompt that fails runs no other layer; its taker runs all of them.
        """
        if self._running is None:
            work = self._queue.next_for_target()
            if work is None:
                return False
            self._running = _RunningLayer(work)
        running = self._running
        name, layer = running.work.batch.name, running.work.first
        rows = self._rows[name]
        chunk = PromptChunk.after(name, running.done, len(rows))
        try:
            output = self.chain.run(layer, chunk, rows[chunk.start : chunk.start + chunk.count])
        except FAULTS as error:
            log.info("layer %d failed for a prompt: %r", layer, error)
            self._running = None
            self._queue.refuse(name)
            return True
        running.outputs.append(output)
        running.done += chunk.count
        if running.done == len(rows):
            self._rows[name] = torch.cat(running.outputs) if len(running.outputs) > 1 else output
            self._running = None
            self._queue.complete(running.work)
        return True
