"""Binding: the layers of a stage with weights that are views into a model image."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from invoker.engine.contract import DeviceRegion, ModelSpec, UnsupportedModel
from invoker.engine.decoder_models import decoder_config, model_without_weights
from invoker.engine.fused_weights import bind_fused
from invoker.engine.geometry import Geometry, geometry_of, probe_of
from invoker.engine.image_ranges import layer_byte_ranges
from invoker.engine.image_views import ImageViews, saved_tensors, set_tensor
from invoker.engine.kv.cache import KvPool
from invoker.engine.layer_range import LayerRange, layer_index
from invoker.engine.layout import AttentionMetadata
from invoker.engine.paths import LayerPath, choose_path
from invoker.engine.tensor_sources import TensorSources
from registry.images.manifest import TensorEntry

logger = logging.getLogger(__name__)


class StageModel(Protocol):
    """The part of a decoder that a stage runs."""

    def run(
        self,
        inputs: torch.Tensor,
        step: AttentionMetadata,
        pool: KvPool,
        rows: torch.Tensor | None,
        layers: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Return hidden states, `[tokens, hidden]`; K and V go to the pool's layers.

        `layers` are those to run (None: all of the stage). `inputs` are token ids, `[tokens]`, in front of
        layer 0, else hidden states. Behind the last layer they are normed, and only `rows` are returned
        (None: all).
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, `[rows, vocabulary]`, for rows of the last stage: if the stage has the head."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStage:
    """The layers `[first, last)` with weights bound.

    `has_head` is set where the head runs: an untied one on the last stage, a tied one on the first.
    """

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    first: int
    last: int
    path: LayerPath
    model: StageModel
    has_head: bool


def bind(spec: ModelSpec, region: DeviceRegion, path: LayerPath = LayerPath.AUTO) -> BoundStage:
    """Build the layers of `spec` with views of `region` as weights, on the fused path where it applies.

    No weight memory is allocated but for what cannot be a view. Bytes of layers outside the range are never
    read, so they need not have arrived. Raises UnsupportedModel.
    """
    architecture, tied = spec.manifest.architecture, spec.manifest.tied_head
    config = decoder_config(architecture, spec.config)
    layers = config.num_hidden_layers
    first, last = spec.layers or (0, layers)
    if not 0 <= first < last <= layers:
        raise UnsupportedModel(f"layers [{first}, {last}) of a model with {layers}")
    views = ImageViews(spec, region)
    geometry = geometry_of(architecture, spec.config)
    choice = choose_path(path, architecture, config, views.entries, range(first, last))
    logger.info("layers [%s, %s): path %s: %s", first, last, choice.path, choice.reason)
    model: StageModel
    if choice.path is LayerPath.FUSED:
        model = bind_fused(views, config, geometry, first, last, tied=tied)
    else:
        model = _bind_range(spec, views, config, first, last)
    return BoundStage(
        geometry=geometry,
        dtype=views.dtype,
        device=views.device,
        first=first,
        last=last,
        path=choice.path,
        model=model,
        has_head=first == 0 if tied else last == layers,
    )


class _BoundRange:
    """The StageModel of a LayerRange; `copies` are made when the first step runs, as all bytes are here."""

    def __init__(self, layers: LayerRange, copies: list[Callable[[], None]]) -> None:
        self.layers = layers
        self._copies = copies

    def run(
        self,
        inputs: torch.Tensor,
        step: AttentionMetadata,
        pool: KvPool,
        rows: torch.Tensor | None,
        layers: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        while self._copies:
            self._copies.pop()()
        hidden = self.layers.run(inputs, step, pool, layers)
        last = self.layers.last if layers is None else layers[1]
        ends = last == self.layers.model.config.num_hidden_layers
        return hidden.index_select(0, rows) if ends and rows is not None else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers.logits(hidden)


def _bind_range(spec: ModelSpec, views: ImageViews, config: Any, first: int, last: int) -> StageModel:
    manifest = spec.manifest
    model = model_without_weights(manifest.architecture, config)
    model.config.dtype = views.dtype
    tensors = list(saved_tensors(model))
    sources = TensorSources(model, views.names, tied=manifest.tied_head)
    head = model.get_output_embeddings()
    layers = LayerRange(model, first, last, views.device)
    in_front = probe_of(manifest.architecture, spec.config).in_front
    arrived = layer_byte_ranges(manifest, first, last)
    copies: list[Callable[[], None]] = []
    for owner, attribute, target in tensors:
        index = layer_index(layers.layers_name, target)
        if index is not None:
            runs = first <= index < last
        elif owner is head:
            runs = first == 0 if manifest.tied_head else last == config.num_hidden_layers
        elif target.rpartition(".")[0] in in_front:
            runs = first == 0
            if not runs:  # it runs nevertheless, without effect
                meta = getattr(owner, attribute)
                dtype = views.dtype if meta.is_floating_point() else meta.dtype
                nothing = torch.zeros(1, dtype=dtype, device=views.device)
                set_tensor(owner, attribute, nothing.expand(meta.shape))
        else:
            runs = last == config.num_hidden_layers
        if not runs:
            continue
        for name in sources.names_of(target):
            if not _lies_in(views.entries[name], arrived):
                raise UnsupportedModel(f"{name} does not lie in the bytes of layers [{first}, {last})")
        late = sources.bind(owner, attribute, target, views)
        copies += [late] if late is not None else []
    if copies:
        logger.warning(
            "%d tensors of %s are copied: they cannot be views", len(copies), manifest.architecture
        )
    return _BoundRange(layers, copies)


def _lies_in(entry: TensorEntry, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(start <= entry.offset and entry.offset + entry.nbytes <= end for start, end in ranges)
