"""Layers of a model from the first one on, each a stage of its own: so any of them can be the next to run,
and more can come."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invoker.engine.kv_slices import KvSlice
from invoker.engine.stage_contract import (
    Opening,
    Stage,
    StageChunk,
    StageFacts,
    StageInput,
    StageOutput,
    StageStep,
)
from registry.messages import Sampling

# Of a prompt that run at once. Between two parts the source's engine runs a step of what decodes, which reads
# all weights anew: about 11 ms of a 13B model on an H800, where these take 50 in half of the layers.
CHUNK_TOKENS = 2048
_NO_SAMPLING = Sampling(max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tokens `[start, start + count)` of a prompt of `total` tokens."""

    name: str
    start: int
    count: int
    total: int


class LayerChain:
    """Runs parts of prompts, whose K and V stay until they are forgotten. Draws no tokens. One thread's."""

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self._stages = list(stages)
        self._open: dict[str, set[int]] = {}  # the layers that have something of a prompt

    def __repr__(self) -> str:
        return f"<LayerChain {len(self._stages)} layers, {len(self._open)} prompts>"

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def facts(self) -> StageFacts:
        return self._stages[0].facts

    def append(self, stage: Stage) -> None:
        """The next layer."""
        assert stage.layers == (len(self), len(self) + 1), stage
        self._stages.append(stage)

    def run(self, layer: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        """The part's rows behind the layer: what the next one takes; of the last layer nothing. Raises
        EngineError."""
        opened = self._open.setdefault(part.name, set())
        opening = Opening(sequence=part.name, most=part.total, sampling=_NO_SAMPLING)
        chunk = StageChunk(sequence=part.name, start=part.start, count=part.count, last=False)
        step = StageStep(number=0, closed=(), opened=() if layer in opened else (opening,), chunks=(chunk,))
        opened.add(layer)
        output: StageOutput = self._stages[layer].run(StageInput(step=step, data=rows))
        return rows if output.hidden is None else output.hidden

    def slices(self, name: str, first: int, last: int) -> tuple[KvSlice, ...]:
        """Copies of a prompt's K and V in these layers, one a layer."""
        return tuple(stage.export_kv(name) for stage in self._stages[first:last])

    def forget(self, name: str) -> None:
        """Free what the layers have of a prompt, if anything."""
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


def settle(rows: torch.Tensor) -> torch.Tensor:
    """Return when they are computed: on an accelerator nothing else times a step that draws no tokens."""
    if rows.is_cuda:
        torch.cuda.synchronize(rows.device)
    return rows
