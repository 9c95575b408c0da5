"""Attention over the paged KV cache, registered as an attention function of Hugging Face layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from invoker.engine.kv.cache import PAGE_TOKENS, KvPool
from invoker.engine.layout import AttentionCall, AttentionMetadata

ATTENTION = "hypercast_paged"

Cache = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """What a model does to its attention scores.

    They are capped softly at `softcap` (Gemma 2); key i of a sequence adds i * `slopes`, `[heads]` (ALiBi,
    Press et al. 2022); `sinks`, `[heads]`, take part in the softmax without a value (gpt-oss).
    """

    softcap: float | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


AttentionPlace = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float | None, int | None, ScoreRule | None], torch.Tensor
]
"""The KV cache behind an attention module, which has it as its attribute `place`.

Called with query, key and value, `[1, heads, tokens, head_dim]`, the scaling (None: `head_dim ** -0.5`), the
module's window and the rule of its scores: stores keys and values, and returns attention,
`[1, tokens, heads, head_dim]`.
"""


@dataclass(slots=True)
class CurrentStep:
    """The metadata of the step that a stage runs, and the KV cache of its layers; None between steps."""

    metadata: AttentionMetadata | None = None
    pool: KvPool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPlace:
    """The AttentionPlace of layer `layer` of a stage.

    `window` is the layer's in tokens, None for unlimited, if its module names none.
    """

    step: CurrentStep
    layer: int
    window: int | None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        rule: ScoreRule | None,
    ) -> torch.Tensor:
        step, pool = self.step.metadata, self.step.pool
        assert step is not None and pool is not None
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        value_width = value.shape[-1]
        query, key, value = (_padded(x, pool.shape.head_dim) for x in (query, key, value))
        pool.write(self.layer, step.slots, torch.cat((key[0], value[0])).transpose(0, 1))
        cache = pool.layers[self.layer]
        calls = step.calls(window or self.window)
        outputs = [attend(call, query, key, value, cache, scaling, rule) for call in calls]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output[..., :value_width].unsqueeze(0)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend at the module's AttentionPlace; no attention weights are returned.

    The `attention_mask` of the layers is not used: the metadata has the limits of each sequence.
    """
    place: Any = module.place
    rule = None if softcap is None and s_aux is None else ScoreRule(softcap=softcap, sinks=s_aux)
    return place(query, key, value, scaling, sliding_window, rule), None


def attend(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Cache,
    scaling: float | None,
    rule: ScoreRule | None = None,
) -> torch.Tensor:
    """Return the output of one call, `[rows, heads, head_dim]`; inputs are `[1, heads, tokens, head_dim]`."""
    own = query[:, :, call.first : call.last]
    if call.queries == 1:
        return _attend_one_each(call, own, key.shape[1], cache, scaling, rule)
    if call.fresh:
        keys, values = (x[:, :, call.first : call.last] for x in (key, value))
    else:
        keys, values = (_run(call.runs[0], x) if call.pages is None else _gather(call, x) for x in cache)
    if rule is not None:
        out = _by_rule(own, keys, values, call.mask, scaling, rule)
    else:
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
    cache: Cache,
    scaling: float | None,
    rule: ScoreRule | None,
) -> torch.Tensor:
    """Return the output of a call in which each sequence has one query, `[rows, heads, head_dim]`."""
    _, heads, rows, head_dim = query.shape
    # Query heads that share a key head are folded into the query dimension: no key is repeated.
    folded = query[0].transpose(0, 1).reshape(rows, kv_heads, -1, head_dim)

    def of(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if rule is None:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=call.mask, scale=scaling)
        unfolded = queries.reshape(-1, heads, 1, head_dim)
        return _by_rule(unfolded, keys, values, call.mask, scaling, rule)

    if call.pages is not None:
        keys, values = (_gather(call, x) for x in cache)
        out = of(folded, keys, values)
    else:
        keys, values = cache
        parts = [
            of(one, _run(run, keys), _run(run, values))
            for one, run in zip(folded.split(1), call.runs, strict=True)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(rows, heads, head_dim)


def _by_rule(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    rule: ScoreRule,
) -> torch.Tensor:
    """Return attention, `[sequences, heads, queries, head_dim]`, step by step: no kernel has such scores.

    Without a mask, more than one query is causal; the last query is at the last key.
    """
    sequences, heads, queries, head_dim = query.shape
    kv_heads, count = keys.shape[1:3]
    grouped = query.reshape(sequences, kv_heads, -1, queries, head_dim)
    scores = (grouped @ keys[:, :, None].transpose(-1, -2)).float()
    scores *= head_dim**-0.5 if scaling is None else scaling
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if rule.slopes is not None:
        places = torch.arange(count, device=scores.device, dtype=torch.float32)
        scores += rule.slopes.view(kv_heads, -1, 1, 1) * places
    if mask is not None:
        scores += mask.unsqueeze(2)
    elif queries > 1:
        hidden = torch.ones(queries, count, dtype=torch.bool, device=scores.device)
        scores.masked_fill_(hidden.triu(count - queries + 1), float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights.to(values.dtype) @ values[:, :, None]).reshape(sequences, heads, queries, -1)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return `x` with zeros behind its last dimension: keys and values of one cache are equally wide."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


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
