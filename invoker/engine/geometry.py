"""The sizes of a decoder, and what else memory and binding need of it before it has weights."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch

from invoker.engine.contract import UnsupportedModel
from invoker.engine.decoder_models import decoder_config, longest_of, model_without_weights
from invoker.engine.kv.cache import KvShape
from invoker.engine.layer_range import LayerRange, Probed
from invoker.engine.paths import FUSIBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes of a decoder that memory planning needs.

    `head_dim` is the larger of a key's and a value's; `longest` is the number of positions that the model can
    distinguish.
    """

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    longest: int

    def kv_shape(self, layers: int, dtype: torch.dtype) -> KvShape:
        """Return the shape of K and V in `layers` layers."""
        return KvShape(layers=layers, heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What only a run shows: the sizes of keys and values, and the modules in front of the layers."""

    kv_heads: int
    head_dim: int
    in_front: frozenset[str]


def geometry_of(architecture: str, raw: Mapping[str, object]) -> Geometry:
    """Return the sizes of a decoder. Raises UnsupportedModel."""
    config = decoder_config(architecture, raw)
    heads = config.num_attention_heads
    if architecture in FUSIBLE:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    else:
        probe = probe_of(architecture, raw)
        kv_heads, head_dim = probe.kv_heads, probe.head_dim
    return Geometry(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=config.vocab_size,
        longest=longest_of(config),
    )


def probe_of(architecture: str, raw: Mapping[str, object]) -> Probe:
    """Return what a run of the decoder's first layer shows, cached. Raises UnsupportedModel."""
    return _probe(architecture, json.dumps(raw, sort_keys=True, default=repr))


@functools.lru_cache(maxsize=64)
def _probe(architecture: str, raw: str) -> Probe:
    model = model_without_weights(architecture, decoder_config(architecture, json.loads(raw)))
    place = _ProbePlace()
    in_front = LayerRange(model, 0, 1, torch.device("meta")).probe(place)
    if not place.kv_heads:
        raise UnsupportedModel(f"the first layer of {architecture} has no attention")
    return Probe(kv_heads=place.kv_heads, head_dim=place.head_dim, in_front=in_front)


class _ProbePlace:
    """An AttentionPlace that takes the sizes of keys and values, and ends the run."""

    kv_heads = 0
    head_dim = 0

    def __call__(self, _: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: object) -> NoReturn:
        self.kv_heads, self.head_dim = key.shape[1], max(key.shape[-1], value.shape[-1])
        raise Probed
