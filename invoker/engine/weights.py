"""Binding: decoder layers whose weights are views into a model image."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from invoker.engine.attention import ATTENTION
from invoker.engine.contract import DeviceRegion, ModelSpec, UnsupportedModel
from invoker.engine.families import Family, Geometry, family_of, geometry_of, parse_config
from invoker.engine.fused_weights import bind_fused
from invoker.engine.hf_layers import HuggingFaceLayers
from invoker.engine.image_views import ImageViews, parameters
from invoker.engine.kv_cache import KvPool
from invoker.engine.layout import Step
from invoker.engine.paths import LayerPath, choose_path

logger = logging.getLogger(__name__)


class LayerStack(Protocol):
    """Layers of a decoder that run one after the other."""

    def run(self, hidden: torch.Tensor, step: Step, pool: KvPool) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` in and out; K and V go to the pool's layers, from its first on."""
        ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """All weights and buffers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStage:
    """The layers `[first, last)` with weights bound, and the ends of the model that this stage runs.

    `embedding` (and `positions`) are there if the stage has layer 0, and `norm` if it has the last one.
    `head` is there where it runs: an untied one on the last stage, a tied one on the first.
    """

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    first: int
    last: int
    path: LayerPath
    layers: LayerStack
    embedding: torch.Tensor | None
    positions: torch.Tensor | None
    norm: nn.Module | None
    head: torch.Tensor | None


def bind(spec: ModelSpec, region: DeviceRegion, path: LayerPath = LayerPath.AUTO) -> BoundStage:
    """Make the layers of `spec` with views of `region` as weights, by the fused path where it applies.

    Nothing is copied and no weight memory is allocated. Bytes of layers outside the range are never
    looked at, so they need not have arrived. Raises UnsupportedModel.
    """
    family = family_of(spec.manifest.architecture)
    config = parse_config(family, spec.config)
    config._attn_implementation = ATTENTION
    geometry = geometry_of(config)
    first, last = spec.layers or (0, geometry.layers)
    if not 0 <= first < last <= geometry.layers:
        raise UnsupportedModel(f"layers [{first}, {last}) of a model with {geometry.layers}")

    views = ImageViews(spec, region)
    prefix = _prefix(family, views.names)
    tied = spec.manifest.tied_head
    ends = last == geometry.layers
    with torch.device("meta"):
        sample = family.layer(config, first)
        norm = family.norm(config.hidden_size, eps=getattr(config, family.norm_eps)) if ends else None
    _check_names(_expected(family, geometry, prefix, tied, sample), views.names)

    layers_prefix = f"{prefix}{family.layers}."
    choice = choose_path(
        path,
        spec.manifest.architecture,
        config,
        views.entries,
        [f"{layers_prefix}{index}." for index in range(first, last)],
    )
    logger.info("layers [%s, %s) take the path %s: %s", first, last, choice.path, choice.reason)
    # Built for real: its frequencies are in no checkpoint, so on meta they would stay empty.
    rotary = family.rotary(config).to(views.device) if family.rotary is not None else None
    layers: LayerStack
    if choice.path is LayerPath.FUSED:
        assert rotary is not None
        layers = bind_fused(views, family, config, rotary, layers_prefix, first, last)
    else:
        layers = _bind_modules(views, family, config, rotary, layers_prefix, first, last)

    def name(part: str) -> str:
        return f"{prefix}{part}.weight"

    if norm is not None:
        views.assign(norm, f"{prefix}{family.final_norm}.")
    table = (geometry.vocabulary, config.hidden_size)
    embedding = views.view(name(family.embedding), table) if first == 0 else None
    positions = None
    if first == 0 and family.positions:
        positions = views.view(name(family.positions), (config.max_position_embeddings, config.hidden_size))
    untied = ends and not tied
    head = views.view(f"{family.head}.weight", table) if untied else embedding if tied else None
    return BoundStage(
        geometry=geometry,
        dtype=views.dtype,
        device=views.device,
        first=first,
        last=last,
        path=choice.path,
        layers=layers,
        embedding=embedding,
        positions=positions,
        norm=norm,
        head=head,
    )


def _bind_modules(
    views: ImageViews,
    family: Family,
    config: Any,
    rotary: nn.Module | None,
    prefix: str,
    first: int,
    last: int,
) -> HuggingFaceLayers:
    with torch.device("meta"):
        layers = [family.layer(config, index) for index in range(first, last)]
    for index, layer in zip(range(first, last), layers, strict=True):
        views.assign(layer, f"{prefix}{index}.")
    return HuggingFaceLayers(layers, rotary, first)


def _prefix(family: Family, names: frozenset[str]) -> str:
    bare = f"{family.embedding}.weight" in names
    return "" if bare else family.prefix


def _expected(family: Family, geometry: Geometry, prefix: str, tied: bool, layer: nn.Module) -> set[str]:
    """The names of the whole model's tensors: all layers are alike."""
    of_layer = [name for _, _, name in parameters(layer, "")]
    names = {f"{prefix}{family.layers}.{i}.{name}" for i in range(geometry.layers) for name in of_layer}
    names.add(f"{prefix}{family.embedding}.weight")
    names.add(f"{prefix}{family.final_norm}.weight")
    if family.norm is nn.LayerNorm:
        names.add(f"{prefix}{family.final_norm}.bias")
    if family.positions:
        names.add(f"{prefix}{family.positions}.weight")
    if not tied:
        names.add(f"{family.head}.weight")
    return names


def _check_names(wanted: set[str], found: frozenset[str]) -> None:
    missing = sorted(wanted - found)
    extra = sorted(found - wanted)
    if missing:
        raise UnsupportedModel(f"the checkpoint lacks {_listed(missing)}")
    if extra:
        raise UnsupportedModel(f"the checkpoint has tensors that the architecture lacks: {_listed(extra)}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
