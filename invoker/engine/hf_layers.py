"""Hugging Face decoder layers as a LayerStack."""

from collections.abc import Sequence

import torch
from torch import nn

from invoker.engine.attention import AttentionContext
from invoker.engine.kv.cache import KvPool
from invoker.engine.layout import AttentionMetadata


class HuggingFaceLayers:
    """A LayerStack of layer modules, the first of which has the index `first` in the model.

    `rotary` is None where positions are a learned embedding.
    """

    def __init__(self, layers: Sequence[nn.Module], rotary: nn.Module | None, first: int) -> None:
        self._layers = tuple(layer.eval() for layer in layers)
        self.rotary = rotary
        self._first = first

    def __repr__(self) -> str:
        return f"<HuggingFaceLayers {len(self._layers)}>"

    def run(self, hidden: torch.Tensor, step: AttentionMetadata, pool: KvPool) -> torch.Tensor:
        """Run `hidden`, `[tokens, hidden]`, through all layers."""
        hidden = hidden.unsqueeze(0)
        run = AttentionContext(step=step, pool=pool, first_layer=self._first)
        kwargs = {}
        if self.rotary is not None:
            kwargs["position_embeddings"] = self.rotary(hidden, position_ids=step.positions[None])
        for layer in self._layers:
            hidden = layer(hidden, attention_mask=None, run=run, **kwargs)
        return hidden[0]
