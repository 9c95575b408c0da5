"""Fused layers of the Llama family: q|k|v and gate|up are one matrix each, a view of the image."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from invoker.engine.attention import attend
from invoker.engine.kv.cache import KvPool
from invoker.engine.layout import AttentionMetadata
from invoker.engine.projection import as_columns, by_columns, project


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """One layer's weights, all views of the image; `window` limits the range of its attention, in tokens."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedShape:
    """The sizes that all layers share. `frequencies` rotate the first `2 * len` elements of each head."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    frequencies: torch.Tensor
    rotary_scale: float


class FusedLayers:
    """A LayerStack of fused layers."""

    def __init__(self, shape: FusedShape, layers: Sequence[FusedLayer]) -> None:
        self.shape = shape
        self._layers = tuple(layers)

    def __repr__(self) -> str:
        return f"<FusedLayers {len(self._layers)}>"

    def __len__(self) -> int:
        return len(self._layers)

    def run(
        self, hidden: torch.Tensor, step: AttentionMetadata, pool: KvPool, first: int, last: int
    ) -> torch.Tensor:
        """Run `hidden`, `[tokens, hidden]`, through the layers `[first, last)` of these."""
        cos, sin = self._angles(step.positions, hidden.dtype)
        # One memory layout in every layer, so that the bits do not depend on where the model is cut.
        columns = by_columns(hidden)
        if columns:
            hidden = as_columns(hidden)
        for index, layer in enumerate(self._layers[first:last], first):
            hidden = hidden + self._attention(index, layer, hidden, cos, sin, step, pool)
            hidden = hidden + self._mlp(layer, hidden)
        return hidden.contiguous() if columns else hidden

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[tokens, 1, half]`."""
        angles = positions.float()[:, None, None] * self.shape.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.shape.rotary_scale != 1:
            cos, sin = cos * self.shape.rotary_scale, sin * self.shape.rotary_scale
        return cos.to(dtype), sin.to(dtype)

    def _attention(
        self,
        index: int,
        layer: FusedLayer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: AttentionMetadata,
        pool: KvPool,
    ) -> torch.Tensor:
        shape = self.shape
        x = rms_norm(hidden, layer.attention_norm, shape.norm_eps)
        # By rows from here on: attention is fast only where a head's elements lie side by side.
        heads = project(x, layer.qkv, layer.qkv_bias).contiguous().view(x.shape[0], -1, shape.head_dim)
        turned = shape.heads + shape.kv_heads
        if layer.query_norm is not None and layer.key_norm is not None:
            for part, weight in (
                (heads[:, : shape.heads], layer.query_norm),
                (heads[:, shape.heads : turned], layer.key_norm),
            ):
                part.copy_(rms_norm(part, weight, shape.norm_eps))
        rotate_(heads[:, :turned], cos, sin)
        keys, values = heads[:, shape.heads : turned], heads[:, turned:]
        pool.write(index, step.slots, heads[:, shape.heads :])
        # Laid out as attention wants it: [1, heads, tokens, head_dim].
        q, k, v = (part.transpose(0, 1)[None] for part in (heads[:, : shape.heads], keys, values))
        outputs = [attend(call, q, k, v, pool.layers[index], None) for call in step.calls(layer.window)]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return project(output.reshape(x.shape[0], -1), layer.out, layer.out_bias)

    def _mlp(self, layer: FusedLayer, hidden: torch.Tensor) -> torch.Tensor:
        x = rms_norm(hidden, layer.mlp_norm, self.shape.norm_eps)
        gate, up = project(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return project(F.silu(gate).mul_(up), layer.down, layer.down_bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the root-mean-square norm over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first elements of `[tokens, heads, head_dim]` by their positions, in place.

    Element i of the first half and element i of the second half of the rotated part form a pair.
    """
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    moved = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(moved)
