"""Attention modules of transformers that are not written against its attention interface.

Each has its own arithmetic between the projections, which is replaced by attention over the KV cache. Models
with such modules are built with attention `eager`, the only one that they all have.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.gptj.modeling_gptj import GPTJAttention

from invoker.engine.attention import ScoreRule

ADAPTED_ARCHITECTURES = frozenset({"BloomForCausalLM", "FalconForCausalLM", "GPTJForCausalLM"})


def adapt(module: nn.Module, device: torch.device) -> bool:
    """Replace the arithmetic of an attention module listed here; return whether it is one.

    The module's AttentionPlace is its attribute `place`.
    """
    adapter = _ADAPTERS.get(type(module))
    if adapter is not None:
        adapter(module, device)
    return adapter is not None


def _adapt_gptj(module: Any, device: torch.device) -> None:
    def attend(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: object = None
    ) -> tuple[torch.Tensor, None]:
        output = self.place(query, key, value, 1 / self.scale_attn, None, None)
        return output.transpose(1, 2), None

    module._attn = types.MethodType(attend, module)


def _adapt_bloom(module: Any, device: torch.device) -> None:
    rule = ScoreRule(slopes=_slopes(bloom_alibi, module.num_heads, device))

    def forward(
        self: Any, hidden: torch.Tensor, residual: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden))
        output = self.place(query, key, value, self.inv_norm_factor, None, rule)
        return self.dense(output.reshape(hidden.shape)) + residual, None

    module.forward = types.MethodType(forward, module)


def _adapt_falcon(module: Any, device: torch.device) -> None:
    rule = None
    if module.config.alibi:
        slopes = _slopes(falcon_alibi, module.num_heads, device) * module.inv_norm_factor
        rule = ScoreRule(slopes=slopes)

    def forward(
        self: Any,
        hidden: torch.Tensor,
        *_: object,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **__: object,
    ) -> tuple[torch.Tensor, None]:
        heads = self._split_heads(self.query_key_value(hidden))
        query, key, value = (part.transpose(1, 2) for part in heads)
        if rule is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        output = self.place(query, key, value, self.inv_norm_factor, None, rule)
        return self.dense(output.reshape(hidden.shape)), None

    module.forward = types.MethodType(forward, module)


def _slopes(
    alibi: Callable[[torch.Tensor, int, torch.dtype], torch.Tensor], heads: int, device: torch.device
) -> torch.Tensor:
    """Return the slopes of ALiBi, `[heads]`: what a key at position 1 adds."""
    with torch.device("cpu"):
        table = alibi(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)
    return table[:, 0, 1].to(device)


_ADAPTERS: Mapping[type[nn.Module], Callable[[Any, torch.device], None]] = {
    GPTJAttention: _adapt_gptj,
    BloomAttention: _adapt_bloom,
    FalconAttention: _adapt_falcon,
}
