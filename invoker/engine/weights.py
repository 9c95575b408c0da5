"""Binding: decoder layers whose weights are views into a model image."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from invoker.engine.contract import DeviceRegion, ModelSpec, UnsupportedModel
from invoker.engine.device_memory import region_bytes
from invoker.engine.families import Family, Geometry, family_of, geometry_of, parse_config
from registry.images.manifest import TensorEntry

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_STORED: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

ATTENTION = "hypercast_paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStage:
    """The layers `[first, last)` with weights bound, and the ends of the model that this stage runs.

    `embedding` (and `positions`) are there if the stage has layer 0. `norm` and `head` are there
    where the head runs: with an untied head on the last stage, with a tied one on the first.
    """

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    first: int
    last: int
    layers: tuple[nn.Module, ...]
    embedding: torch.Tensor | None
    positions: torch.Tensor | None
    rotary: nn.Module | None
    norm: nn.Module | None
    head: torch.Tensor | None


def compute_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name, or UnsupportedModel."""
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; use {', '.join(DTYPES)}")
    return DTYPES[name]


def bind(spec: ModelSpec, region: DeviceRegion) -> BoundStage:
    """Build the layers of `spec` on the meta device and give them views of `region` as weights.

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

    views = _Views(spec, region)
    prefix = _prefix(family, views.names)
    tied = spec.manifest.tied_head
    has_head = first == 0 if tied else last == geometry.layers
    with torch.device("meta"):
        layers = tuple(family.layer(config, index) for index in range(first, last))
        norm = family.norm(config.hidden_size, eps=getattr(config, family.norm_eps)) if has_head else None

    wanted = _expected(family, geometry, prefix, tied, layers[0])
    _check_names(wanted, views.names)

    def name(part: str) -> str:
        return f"{prefix}{part}.weight"

    for index, layer in zip(range(first, last), layers, strict=True):
        views.assign(layer, f"{prefix}{family.layers}.{index}.")
    if norm is not None:
        views.assign(norm, f"{prefix}{family.final_norm}.")
    table = (geometry.vocabulary, config.hidden_size)
    embedding = views.view(name(family.embedding), table) if first == 0 else None
    positions = None
    if first == 0 and family.positions:
        positions = views.view(name(family.positions), (config.max_position_embeddings, config.hidden_size))
    head = None
    if has_head:
        head = embedding if tied else views.view(f"{family.head}.weight", table)
    # Built for real: its frequencies are in no checkpoint, so on meta they would stay empty.
    rotary = family.rotary(config).to(views.device) if family.rotary is not None else None
    return BoundStage(
        geometry=geometry,
        dtype=views.dtype,
        device=views.device,
        first=first,
        last=last,
        layers=tuple(layer.eval() for layer in layers),
        embedding=embedding,
        positions=positions,
        rotary=rotary,
        norm=norm,
        head=head,
    )


class _Views:
    """Tensors of the manifest as views of the region."""

    def __init__(self, spec: ModelSpec, region: DeviceRegion) -> None:
        if region.nbytes < spec.manifest.nbytes:
            raise UnsupportedModel(f"the region has {region.nbytes} bytes, the image {spec.manifest.nbytes}")
        self.dtype = compute_dtype(spec.dtype)
        self._bytes = region_bytes(region)
        self._entries = {entry.name: entry for entry in spec.manifest.tensors}

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def view(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        entry = self._entries[name]
        self._check(entry, shape)
        flat = self._bytes[entry.offset : entry.offset + entry.nbytes]
        return flat.view(self.dtype).view(shape)

    def assign(self, module: nn.Module, prefix: str) -> None:
        """Replace each parameter below `module` by the view of the tensor of that name."""
        for owner, attribute, name in _parameters(module, prefix):
            meta = owner._parameters[attribute]
            assert meta is not None
            view = self.view(name, tuple(meta.shape))
            owner._parameters[attribute] = nn.Parameter(view, requires_grad=False)

    def _check(self, entry: TensorEntry, shape: tuple[int, ...]) -> None:
        if _STORED.get(entry.dtype) != self.dtype:
            raise UnsupportedModel(
                f"{entry.name} is stored as {entry.dtype}, but the model runs in {self.dtype}; "
                "pack the checkpoint in the dtype that it is to run in"
            )
        if entry.shape != shape:
            raise UnsupportedModel(f"{entry.name} has shape {entry.shape}, config.json implies {shape}")
        if entry.nbytes != prod(shape) * self.dtype.itemsize or entry.offset % self.dtype.itemsize:
            raise UnsupportedModel(f"{entry.name} does not lie in the image as its shape and dtype imply")


def _parameters(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:  # a linear layer without bias
                yield owner, attribute, f"{prefix}{path}.{attribute}" if path else f"{prefix}{attribute}"


def _prefix(family: Family, names: frozenset[str]) -> str:
    bare = f"{family.embedding}.weight" in names
    return "" if bare else family.prefix


def _expected(family: Family, geometry: Geometry, prefix: str, tied: bool, layer: nn.Module) -> set[str]:
    """The names of the whole model's tensors: all layers are alike."""
    of_layer = [name for _, _, name in _parameters(layer, "")]
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
