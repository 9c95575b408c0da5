"""The executor of a pipeline stage: a contiguous range of layers over a step's ragged batch."""

import torch

from invoker.engine.kv.cache import KvPool
from invoker.engine.layout import AttentionMetadata, StepLayout
from invoker.engine.weights import BoundStage


class StageExecutor:
    """The layers of `bound`, with their KV cache in `pool`.

    A step passes through the stages in order of layers: `forward` on each, with token ids on the first and
    the previous stage's output on the others; the last one ends with the final norm. Then `finish`, on the
    stage with `has_head`, turns the last stage's output into logits.
    """

    def __init__(self, bound: BoundStage, pool: KvPool) -> None:
        self.bound = bound
        self.pool = pool

    def __repr__(self) -> str:
        head = ", head" if self.has_head else ""
        return f"<StageExecutor layers [{self.bound.first}, {self.bound.last}){head}>"

    @property
    def has_head(self) -> bool:
        return self.bound.has_head

    @torch.inference_mode()
    def forward(
        self, inputs: torch.Tensor, layout: StepLayout, layers: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Return hidden states for token ids `[tokens]` (first stage) or hidden states `[tokens, hidden]`.

        The stage with the last layer returns only the rows that yield a next token, normed. `layers` are
        those to run (None: all of the stage); `inputs` are those of the first of them.
        """
        return self.bound.model.run(inputs, layout, self.pool, layout.logit_rows, layers)

    @torch.inference_mode()
    def decode(self, inputs: torch.Tensor, step: AttentionMetadata) -> torch.Tensor:
        """Return the logits after each token id of `inputs`, `[tokens]`: for a stage with the whole model."""
        return self.finish(self.bound.model.run(inputs, step, self.pool, None))

    @torch.inference_mode()
    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` for rows of the last stage."""
        assert self.has_head, f"{self!r} has no head"
        return self.bound.model.logits(hidden)
