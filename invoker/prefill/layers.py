"""Runs prompt chunks through single-layer stages, to which more layers can be added."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invoker.engine.kv.slices import KvSlice
from invoker.engine.stage_contract import (
    OpenSequence,
    Stage,
    StageChunk,
    StageFacts,
    StageInput,
    StageOutput,
    StageStep,
)
from registry.messages.node import Sampling

# Prompt tokens per step. Between two chunks the source's engine runs a decode step, which reads all weights
# again: about 11 ms for a 13B model on an H800, where a chunk takes 50 ms in half of the layers.
CHUNK_TOKENS = 2048
_NO_SAMPLING = Sampling(max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """The tokens `[start, start + count)` of a prompt of `total` tokens."""

    name: str
    start: int
    count: int
    total: int


class LayerChain:
    """A chain of single-layer stages; K and V of a prompt stay until `drop`.

    Used by one thread; samples nothing.
    """

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self._stages = list(stages)
        self._open: dict[str, set[int]] = {}  # by prompt, the layers that have K and V of it

    def __repr__(self) -> str:
        return f"<LayerChain {len(self._stages)} layers, {len(self._open)} prompts>"

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def facts(self) -> StageFacts:
        return self._stages[0].facts

    def append(self, stage: Stage) -> None:
        """Add the next layer."""
        assert stage.layers == (len(self), len(self) + 1), stage
        self._stages.append(stage)

    def run(self, layer: int, chunk: PromptChunk, rows: torch.Tensor) -> torch.Tensor:
        """Run a chunk through a layer; return its output rows (of the last layer, the input).

        Raises EngineError.
        """
        opened = self._open.setdefault(chunk.name, set())
        opening = OpenSequence(sequence=chunk.name, max_tokens=chunk.total, sampling=_NO_SAMPLING)
        stage_chunk = StageChunk(sequence=chunk.name, start=chunk.start, count=chunk.count, last=False)
        step = StageStep(
            number=0, closed=(), opened=() if layer in opened else (opening,), chunks=(stage_chunk,)
        )
        opened.add(layer)
        output: StageOutput = self._stages[layer].run(StageInput(step=step, data=rows))
        return rows if output.hidden is None else output.hidden

    def slices(self, name: str, first: int, last: int) -> tuple[KvSlice, ...]:
        """Return copies of a prompt's K and V in layers `[first, last)`, one slice per layer."""
        return tuple(stage.export_kv(name) for stage in self._stages[first:last])

    def drop(self, name: str) -> None:
        """Free a prompt's K and V in all layers."""
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


def synchronize(rows: torch.Tensor) -> torch.Tensor:
    """Wait until `rows` are computed; without sampling nothing else synchronizes a step on an accelerator."""
    if rows.is_cuda:
        torch.cuda.synchronize(rows.device)
    return rows
