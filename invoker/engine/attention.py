"""Attention over the paged KV cache, as an attention function of the Hugging Face layers."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from invoker.engine.kv_cache import KvPool
from invoker.engine.layout import AttentionCall, Step

ATTENTION = "hypercast_paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """One step on one stage: and the pool of the layers from `first_layer` on."""

    step: Step
    pool: KvPool
    first_layer: int


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    run: StepRun,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the step's keys and values, then attend sequence by sequence (or group by group).

    Takes `[1, heads, tokens, head_dim]`, returns `[1, tokens, heads, head_dim]`. The layers' own
    `attention_mask` is not used: the layout knows the sequences' limits.
    """
    index = module.layer_idx
    assert isinstance(index, int)
    layer = index - run.first_layer
    run.pool.write(layer, run.step.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
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
    """One call's output, `[rows, heads, head_dim]`; the step's tensors are `[1, heads, tokens, head_dim]`."""
    heads, head_dim = query.shape[1], query.shape[3]
    rows = call.last - call.first
    own = query[:, :, call.first : call.last]
    if call.fresh:
        keys, values = (x[:, :, call.first : call.last] for x in (key, value))
    else:
        keys, values = (_gather(call, x) for x in cache)
    if call.queries == 1:
        # The query heads that share a key head take the place of queries: no key is repeated.
        folded = own[0].transpose(0, 1).reshape(rows, keys.shape[1], -1, head_dim)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=call.mask, scale=scaling)
        return out.reshape(rows, heads, head_dim)
    out = F.scaled_dot_product_attention(
        own,
        keys,
        values,
        attn_mask=call.mask,
        is_causal=call.mask is None,
        scale=scaling,
        enable_gqa=keys.shape[1] != heads,
    )
    return out[0].transpose(0, 1)


def _gather(call: AttentionCall, cache: torch.Tensor) -> torch.Tensor:
    """The call's keys (or values), `[sequences, heads, tokens, head_dim]`."""
    run = cache[call.page_first : call.page_last] if call.pages is None else cache.index_select(0, call.pages)
    tokens = run.view(call.sequences, -1, cache.shape[2], cache.shape[3])
    return tokens[:, call.key_first : call.key_last].transpose(1, 2)


AttentionInterface.register(ATTENTION, paged_attention)
