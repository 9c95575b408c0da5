"""Binding of the Llama family's fused layers, and of what is around them, to an image."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from invoker.engine.decoder_models import window_of
from invoker.engine.fused import FusedLayer, FusedLayers, FusedShape, rms_norm
from invoker.engine.geometry import Geometry
from invoker.engine.image_views import ImageViews, check_names
from invoker.engine.kv.cache import KvPool
from invoker.engine.layout import AttentionMetadata
from invoker.engine.paths import GATE_UP, QKV, name_prefix
from invoker.engine.projection import project


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedStage:
    """A StageModel of fused layers from layer `first` on.

    `embedding`, `norm` and `head` are set where the stage runs them.
    """

    first: int
    layers: FusedLayers
    embedding: torch.Tensor | None
    norm: torch.Tensor | None
    head: torch.Tensor | None

    def run(
        self,
        inputs: torch.Tensor,
        step: AttentionMetadata,
        pool: KvPool,
        rows: torch.Tensor | None,
        layers: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        first, last = layers or (self.first, self.first + len(self.layers))
        hidden = inputs if self.embedding is None or first else F.embedding(inputs, self.embedding)
        hidden = self.layers.run(hidden, step, pool, first - self.first, last - self.first)
        if self.norm is None or last < self.first + len(self.layers):
            return hidden
        if rows is not None and len(rows) != len(hidden):
            hidden = hidden.index_select(0, rows)
        return rms_norm(hidden, self.norm, self.layers.shape.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None, "the stage has no head"
        return project(hidden, self.head)


def bind_fused(
    views: ImageViews, config: Any, geometry: Geometry, first: int, last: int, *, tied: bool
) -> FusedStage:
    """Bind the layers `[first, last)` and the ends of the model there. Raises UnsupportedModel.

    A tied head is on the stage with layer 0, another one on that with the last layer.
    """
    prefix = name_prefix(views.entries)
    rotary = _rotary(config)
    shape = FusedShape(
        heads=config.num_attention_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        norm_eps=config.rms_norm_eps,
        frequencies=rotary.inv_freq.to(views.device),
        rotary_scale=rotary.attention_scaling,
    )
    embedding, norm, head = f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", "lm_head.weight"
    ends = [embedding, norm] if tied else [embedding, norm, head]
    layers, names = [], set(ends)
    for index in range(first, last):
        layer, of_layer = _bind_layer(
            views, config, shape, f"{prefix}layers.{index}.", window_of(config, index)
        )
        layers.append(layer)
    names |= {f"{prefix}layers.{index}.{name}" for index in range(geometry.layers) for name in of_layer}
    check_names(names, views.names)
    table = config.vocab_size, config.hidden_size
    begins, finishes = first == 0, last == geometry.layers
    runs_head = begins if tied else finishes
    return FusedStage(
        first=first,
        layers=FusedLayers(shape, layers),
        embedding=views.view(embedding, table) if begins else None,
        norm=views.view(norm, (config.hidden_size,)) if finishes else None,
        head=views.view(embedding if tied else head, table) if runs_head else None,
    )


def _rotary(config: Any) -> Any:
    """Return the rotary embedding of the config's model class, built on the CPU: it is in no checkpoint."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = model_class.__name__.removesuffix("ForCausalLM")
    return getattr(sys.modules[model_class.__module__], f"{family}RotaryEmbedding")(config)


def _bind_layer(
    views: ImageViews, config: Any, shape: FusedShape, prefix: str, window: int | None
) -> tuple[FusedLayer, set[str]]:
    """Return the layer whose tensors' names begin with `prefix`, and how these go on."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    bound: set[str] = set()

    def maybe(name: str, *size: int) -> torch.Tensor | None:
        return view(name, *size) if prefix + name in views.entries else None

    def view(name: str, *size: int) -> torch.Tensor:
        bound.add(name)
        return views.view(prefix + name, size)

    def stacked(modules: Sequence[str], sizes: Sequence[int], kind: str, *inputs: int) -> torch.Tensor:
        names = [f"{prefix}{module}.{kind}" for module in modules]
        bound.update(f"{module}.{kind}" for module in modules)
        return views.stacked([(name, (size, *inputs)) for name, size in zip(names, sizes, strict=True)])

    def weight(whole: str, modules: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        # Some checkpoints are fused already.
        fused = maybe(f"{whole}.weight", sum(sizes), hidden)
        return stacked(modules, sizes, "weight", hidden) if fused is None else fused

    def bias(modules: Sequence[str], sizes: Sequence[int]) -> torch.Tensor | None:
        return stacked(modules, sizes, "bias") if f"{prefix}{modules[0]}.bias" in views.entries else None

    qkv, gate_up = (queries, keys, keys), (inner, inner)
    layer = FusedLayer(
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
    return layer, bound
