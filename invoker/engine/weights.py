"""Binding: decoder layers with weights that are views into a model image."""

import logging
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from invoker.engine.attention import ATTENTION
from invoker.engine.contract import DeviceRegion, ModelSpec, UnsupportedModel
from invoker.engine.families import Family, Geometry, family_of, geometry_of, parse_config
from invoker.engine.fused_weights import bind_fused
from invoker.engine.hf_layers import HuggingFaceLayers
from invoker.engine.image_views import ImageViews, saved_tensors
from invoker.engine.kv.cache import KvPool
from invoker.engine.layout import AttentionMetadata
from invoker.engine.paths import LayerPath, choose_path

logger = logging.getLogger(__name__)


class LayerStack(Protocol):
    """Layers of a decoder that run one after the other."""

    def run(self, hidden: torch.Tensor, step: AttentionMetadata, pool: KvPool) -> torch.Tensor:
        """Run hidden states, `[tokens, hidden]`, through the layers; K and V go to the pool's layers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStage:
    """The layers `[first, last)` with weights bound, and the ends of the model that this stage runs.

    `embedding` (and `positions`) are set if the stage has layer 0, and `norm` if it has the last one. `head`
    is set where it runs: an untied one on the last stage, a tied one on the first.
    """

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    first: int
    last: int
    path: LayerPath
    layers: LayerStack
    embedding: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    norm: nn.Module | None = None
    head: torch.Tensor | None = None


def bind(spec: ModelSpec, region: DeviceRegion, path: LayerPath = LayerPath.AUTO) -> BoundStage:
    """Build the layers of `spec` with views of `region` as weights, on the fused path where it applies.

    Nothing is copied and no weight memory is allocated. Bytes of layers outside the range are never read, so
    they need not have arrived. Raises UnsupportedModel.
    """
    family = family_of(spec.manifest.architecture)
    config = parse_config(family.config, spec.config)
    config._attn_implementation = ATTENTION
    geometry = geometry_of(config)
    first, last = spec.layers or (0, geometry.layers)
    if not 0 <= first < last <= geometry.layers:
        raise UnsupportedModel(f"layers [{first}, {last}) of a model with {geometry.layers}")

    views = ImageViews(spec, region)
    prefix = _prefix(family, views.names)
    with torch.device("meta"):
        sample = family.layer(config, first)
    _check_names(_expected(family, geometry, prefix, spec.manifest.tied_head, sample), views.names)

    layers, chosen = _bind_layers(spec, views, family, config, prefix, first, last, path)
    bound = BoundStage(
        geometry=geometry,
        dtype=views.dtype,
        device=views.device,
        first=first,
        last=last,
        path=chosen,
        layers=layers,
    )
    return _with_ends(bound, views, family, config, prefix, tied=spec.manifest.tied_head)


def _bind_layers(
    spec: ModelSpec,
    views: ImageViews,
    family: Family,
    config: Any,
    prefix: str,
    first: int,
    last: int,
    path: LayerPath,
) -> tuple[LayerStack, LayerPath]:
    """Return the layers `[first, last)` bound to the image, and their implementation."""
    layers_prefix = f"{prefix}{family.layers}."
    choice = choose_path(
        path,
        spec.manifest.architecture,
        config,
        views.entries,
        [f"{layers_prefix}{index}." for index in range(first, last)],
    )
    logger.info("layers [%s, %s): path %s: %s", first, last, choice.path, choice.reason)
    # Built on a real device: its frequencies are in no checkpoint, so on meta they would stay empty.
    rotary = family.rotary(config).to(views.device) if family.rotary is not None else None
    if choice.path is LayerPath.FUSED:
        assert rotary is not None
        return bind_fused(views, family, config, rotary, layers_prefix, first, last), choice.path
    return _bind_modules(views, family, config, rotary, layers_prefix, first, last), choice.path


def _with_ends(
    bound: BoundStage, views: ImageViews, family: Family, config: Any, prefix: str, *, tied: bool
) -> BoundStage:
    """Bind the ends of the model that a stage runs.

    The stage with the first layer has the embeddings and a tied head, that with the last layer the norm and
    an untied head.
    """

    def view(part: str, rows: int) -> torch.Tensor:
        return views.view(f"{prefix}{part}.weight", (rows, config.hidden_size))

    if bound.first == 0:
        embedding = view(family.embedding, config.vocab_size)
        positions = view(family.positions, config.max_position_embeddings) if family.positions else None
        bound = replace(bound, embedding=embedding, positions=positions, head=embedding if tied else None)
    if bound.last == bound.geometry.layers:
        with torch.device("meta"):
            norm = family.norm(config.hidden_size, eps=getattr(config, family.norm_eps))
        views.assign(norm, f"{prefix}{family.final_norm}.")
        bound = replace(bound, norm=norm)
        if not tied:
            head = views.view(f"{family.head}.weight", (config.vocab_size, config.hidden_size))
            bound = replace(bound, head=head)
    return bound


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
    """Return the names of the whole model's tensors: all layers are alike."""
    of_layer = [name for _, _, name in saved_tensors(layer)]
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
