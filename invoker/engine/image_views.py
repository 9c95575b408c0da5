"""Tensors of a model image as views of the memory that holds it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import nn

from invoker.engine.contract import DeviceRegion, ModelSpec, UnsupportedModel
from invoker.engine.device_memory import region_bytes
from registry.images.manifest import TensorEntry
from registry.images.safetensors_file import DTYPE_BYTES

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_STORED: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
}


_SHOWN = 8


def compute_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of that name. Raises UnsupportedModel."""
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; use {', '.join(DTYPES)}")
    return DTYPES[name]


def is_aligned(entry: TensorEntry) -> bool:
    """Return whether a tensor can be a view of its image: torch has none at a fraction of an element."""
    return entry.offset % DTYPE_BYTES[entry.dtype] == 0


class ImageViews:
    """The tensors of the spec's manifest in `region`, which has the bytes `spec.held` of the image.

    Raises UnsupportedModel where they do not fit. They are views, but for copies of those that are not
    aligned to their elements, whose bytes must have arrived.
    """

    def __init__(self, spec: ModelSpec, region: DeviceRegion) -> None:
        self._start, self._end = spec.held or (0, spec.manifest.nbytes)
        if region.nbytes < self._end - self._start:
            raise UnsupportedModel(
                f"the region has {region.nbytes} bytes, the image {self._end - self._start}"
            )
        self.dtype = compute_dtype(spec.dtype)
        self.entries: Mapping[str, TensorEntry] = {entry.name: entry for entry in spec.manifest.tensors}
        self._bytes = region_bytes(region)

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.entries)

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the tensor of that name, which must have that shape and dtype (None: the model's)."""
        entry = self._entry(name)
        dtype = dtype or self.dtype
        self._check(entry, shape, dtype)
        return self._view(entry.offset, entry.offset + entry.nbytes, dtype).view(shape)

    def stacked(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
        """Return adjacent tensors as one, stacked along the first dimension."""
        entries = [self._entry(name) for name, _ in parts]
        position = entries[0].offset
        for entry, (_, shape) in zip(entries, parts, strict=True):
            self._check(entry, shape, self.dtype)
            assert entry.offset == position, f"there is a gap before {entry.name}"
            position += entry.nbytes
        flat = self._view(entries[0].offset, position, self.dtype)
        return flat.view(sum(shape[0] for _, shape in parts), *parts[0][1][1:])

    def adjacent(self, names: Sequence[str], shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return tensors as one view of that shape, None unless each begins where the one before it ends."""
        entries = [self.entries[name] for name in names]
        if any(one.offset + one.nbytes != other.offset for one, other in pairwise(entries)):
            return None
        start, end = entries[0].offset, entries[-1].offset + entries[-1].nbytes
        fits = all(_STORED.get(entry.dtype) == self.dtype for entry in entries)
        if not fits or end - start != prod(shape) * self.dtype.itemsize or start % self.dtype.itemsize:
            return None
        return self._view(start, end, self.dtype).view(shape)

    def whole(self, name: str) -> torch.Tensor:
        """Return the tensor of that name as it is stored. Raises UnsupportedModel."""
        entry = self.entries[name]
        dtype = _STORED.get(entry.dtype)
        if dtype is None:
            raise UnsupportedModel(f"{name} is stored as {entry.dtype}, which this engine does not run")
        return self._view(entry.offset, entry.offset + entry.nbytes, dtype).view(entry.shape)

    def bind(self, owner: nn.Module, attribute: str, name: str) -> None:
        """Replace one parameter or buffer of a module by the view of the tensor of that name."""
        meta: torch.Tensor = getattr(owner, attribute)
        view = self.view(name, tuple(meta.shape), None if meta.is_floating_point() else meta.dtype)
        set_tensor(owner, attribute, view)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.entries:
            raise UnsupportedModel(f"the checkpoint lacks {name}")
        return self.entries[name]

    def _view(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        if start < self._start or end > self._end:
            raise UnsupportedModel(f"bytes [{start}, {end}) of the image are not on this node")
        raw = self._bytes[start - self._start : end - self._start]
        return (raw.clone() if start % dtype.itemsize else raw).view(dtype)

    def _check(self, entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if _STORED.get(entry.dtype) != dtype:
            raise UnsupportedModel(
                f"{entry.name} is stored as {entry.dtype}, but the model runs in {dtype}; "
                "pack the checkpoint in the dtype to run in"
            )
        if entry.shape != shape:
            raise UnsupportedModel(f"{entry.name} has shape {entry.shape}, config.json implies {shape}")
        if entry.nbytes != prod(shape) * dtype.itemsize:
            raise UnsupportedModel(f"{entry.name} does not have the size that its shape and dtype imply")


def check_names(wanted: Collection[str], found: Collection[str]) -> None:
    """Compare the names of tensors. Raises UnsupportedModel."""
    if missing := set(wanted) - set(found):
        raise UnsupportedModel(f"the checkpoint lacks {_listed(missing)}")
    if extra := set(found) - set(wanted):
        raise UnsupportedModel(f"the checkpoint has tensors that the architecture lacks: {_listed(extra)}")


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def set_tensor(owner: nn.Module, attribute: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer of a module."""
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[attribute] = tensor


def saved_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str, str]]:
    """Yield each parameter and saved buffer: its owner, its attribute there, and its name in a checkpoint."""
    for path, owner in module.named_modules():
        saved = [name for name in owner._buffers if name not in owner._non_persistent_buffers_set]
        for attribute in (*owner._parameters, *saved):
            if getattr(owner, attribute) is not None:  # a linear layer without bias
                yield owner, attribute, f"{prefix}{path}.{attribute}" if path else f"{prefix}{attribute}"
