"""Attention over the paged KV cache, registered as an attention function of Hugging Face layers."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from invoker.engine.kv.cache import PAGE_TOKENS, KvPool
from invoker.engine.layout import AttentionCall, AttentionMetadata

ATTENTION = "hypercast_paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """The metadata of one step, and the pool of a stage's layers, the first of which is `first_layer`."""

    step: AttentionMetadata
    pool: KvPool
    first_layer: int


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    run: AttentionContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the step's keys and values, then attend call by call.

    `query`, `key` and `value` are `[1, heads, tokens, head_dim]`; returns `[1, tokens, heads, head_dim]` and
    no attention weights. The `attention_mask` of the layers is not used: the metadata has the limits of each
    sequence.
    """
    index = module.layer_idx
    assert isinstance(index, int)
    layer = index - run.first_layer
    run.pool.write(layer, run.step.slots, torch.cat((key[0], value[0])).transpose(0, 1))
    outputs = [
        attend(call, query, key, value, run.pool.layers[layer], scaling)
        for call in run.step.calls(sliding_window)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.unsqueeze(0), None


def attend(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Return the output of one call, `[rows, heads, head_dim]`; inputs are `[1, heads, tokens, head_dim]`."""
    own = query[:, :, call.first : call.last]
    if call.queries == 1:
        return _attend_one_each(call, own, key.shape[1], cache, scaling)
    if call.fresh:
        keys, values = (x[:, :, call.first : call.last] for x in (key, value))
    else:
        keys, values = (_run(call.runs[0], x) if call.pages is None else _gather(call, x) for x in cache)
    out = F.scaled_dot_product_attention(
        own,
        keys,
        values,
        attn_mask=call.mask,
        is_causal=call.mask is None,
        scale=scaling,
        enable_gqa=keys.shape[1] != own.shape[1],
    )
    return out[0].transpose(0, 1)


def _attend_one_each(
    call: AttentionCall,
    query: torch.Tensor,
    kv_heads: int,
    cache: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Return the output of a call in which each sequence has one query, `[rows, heads, head_dim]`."""
    _, heads, rows, head_dim = query.shape
    # Query heads that share a key head are folded into the query dimension: no key is repeated.
    folded = query[0].transpose(0, 1).reshape(rows, kv_heads, -1, head_dim)
    if call.pages is not None:
        keys, values = (_gather(call, x) for x in cache)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=call.mask, scale=scaling)
    else:
        keys, values = cache
        parts = [
            F.scaled_dot_product_attention(one, _run(run, keys), _run(run, values), scale=scaling)
            for one, run in zip(folded.split(1), call.runs, strict=True)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(rows, heads, head_dim)


def _run(run: tuple[int, int], cache: torch.Tensor) -> torch.Tensor:
    """Return the keys (or values) in the slots `[first, last)` as a view, `[1, heads, tokens, head_dim]`."""
    return cache.narrow(2, run[0], run[1] - run[0])


def _gather(call: AttentionCall, cache: torch.Tensor) -> torch.Tensor:
    """Return a copy of the keys (or values) on the call's pages, `[sequences, heads, tokens, head_dim]`."""
    assert call.pages is not None
    heads, head_dim = cache.shape[1], cache.shape[3]
    copied = cache.view(heads, -1, PAGE_TOKENS * head_dim).index_select(1, call.pages)
    tokens = copied.view(heads, call.sequences, -1, head_dim)
    return tokens[:, :, call.key_first : call.key_last].transpose(0, 1)


AttentionInterface.register(ATTENTION, paged_attention)
