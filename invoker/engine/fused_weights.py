"""Binding of the Llama family's fused layers to an image."""

from collections.abc import Sequence
from typing import Any

import torch

from invoker.engine.families import Family, geometry_of
from invoker.engine.fused import FusedLayer, FusedLayers, FusedShape
from invoker.engine.image_views import ImageViews
from invoker.engine.paths import GATE_UP, QKV


def bind_fused(
    views: ImageViews, family: Family, config: Any, rotary: Any, prefix: str, first: int, last: int
) -> FusedLayers:
    """Bind the layers `[first, last)`, with tensors named `{prefix}{index}.…`. Raises UnsupportedModel."""
    geometry = geometry_of(config)
    shape = FusedShape(
        heads=config.num_attention_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        norm_eps=config.rms_norm_eps,
        frequencies=rotary.inv_freq,
        rotary_scale=rotary.attention_scaling,
    )
    layers = [
        _bind_layer(views, config, shape, f"{prefix}{index}.", family.window(config, index))
        for index in range(first, last)
    ]
    return FusedLayers(shape, layers)


def _bind_layer(
    views: ImageViews, config: Any, shape: FusedShape, prefix: str, window: int | None
) -> FusedLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def maybe(name: str, *size: int) -> torch.Tensor | None:
        return views.view(prefix + name, size) if prefix + name in views.entries else None

    def view(name: str, *size: int) -> torch.Tensor:
        return views.view(prefix + name, size)

    def stacked(modules: Sequence[str], sizes: Sequence[int], kind: str, *inputs: int) -> torch.Tensor:
        names = [f"{prefix}{module}.{kind}" for module in modules]
        return views.stacked([(name, (size, *inputs)) for name, size in zip(names, sizes, strict=True)])

    def weight(whole: str, modules: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        # Some checkpoints are fused already.
        fused = maybe(f"{whole}.weight", sum(sizes), hidden)
        return stacked(modules, sizes, "weight", hidden) if fused is None else fused

    def bias(modules: Sequence[str], sizes: Sequence[int]) -> torch.Tensor | None:
        return stacked(modules, sizes, "bias") if f"{prefix}{modules[0]}.bias" in views.entries else None

    qkv, gate_up = (queries, keys, keys), (inner, inner)
    return FusedLayer(
        attention_norm=view("input_layernorm.weight", hidden),
        qkv=weight("self_attn.qkv_proj", QKV, qkv),
        qkv_bias=bias(QKV, qkv),
        query_norm=maybe("self_attn.q_norm.weight", shape.head_dim),
        key_norm=maybe("self_attn.k_norm.weight", shape.head_dim),
        out=view("self_attn.o_proj.weight", hidden, queries),
        out_bias=maybe("self_attn.o_proj.bias", hidden),
        mlp_norm=view("post_attention_layernorm.weight", hidden),
        gate_up=weight("mlp.gate_up_proj", GATE_UP, gate_up),
        gate_up_bias=bias(GATE_UP, gate_up),
        down=view("mlp.down_proj.weight", hidden, inner),
        down_bias=maybe("mlp.down_proj.bias", hidden),
        window=window,
    )
