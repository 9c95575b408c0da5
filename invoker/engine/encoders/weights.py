"""Binding: an encoder's modules with weights and buffers that are views into a model image."""

import re
from collections.abc import Iterator
from math import prod

import torch
from torch import nn

from invoker.engine.contract import DeviceRegion, ModelSpec, UnsupportedModel
from invoker.engine.device_memory import region_bytes
from invoker.engine.image_views import compute_dtype
from registry.images.manifest import LayerSpan, TensorEntry

_STORED = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}

# Names in checkpoints, and in the modules. ViT's modules were renamed while its files kept their names;
# gamma and beta come from the oldest BERT files.
_RENAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
        (r"^vit\.encoder\.layer\.", "vit.layers."),
        (r"^(vit\..*)\.attention\.attention\.(query|key|value)\.", r"\1.attention.\2."),
        (r"^(vit\..*)\.attention\.output\.dense\.", r"\1.attention.o_proj."),
        (r"^(vit\..*)\.attention\.query\.", r"\1.attention.q_proj."),
        (r"^(vit\..*)\.attention\.key\.", r"\1.attention.k_proj."),
        (r"^(vit\..*)\.attention\.value\.", r"\1.attention.v_proj."),
        (r"^(vit\..*)\.intermediate\.dense\.", r"\1.mlp.fc1."),
        (r"^(vit\..*)\.output\.dense\.", r"\1.mlp.fc2."),
    )
)


def module_name(name: str, prefix: str) -> str:
    """Return the module's name for a checkpoint's tensor, without the base model's `prefix`."""
    name = name.removeprefix(prefix)
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def bind(
    model: nn.Module, spec: ModelSpec, region: DeviceRegion, prefix: str, spans: tuple[LayerSpan, ...]
) -> torch.device:
    """Assign views of `region` to the meta-device `model`, for all tensors within `spans`.

    Nothing is copied, no weight memory is allocated, and bytes outside the spans are never read: their
    tensors stay on the meta device, where using them raises. Returns the region's device.
    """
    if region.nbytes < spec.manifest.nbytes:
        raise UnsupportedModel(f"the region has {region.nbytes} bytes, the image {spec.manifest.nbytes}")
    dtype = compute_dtype(spec.dtype)
    flat = region_bytes(region)
    tensors = {module_name(entry.name, prefix): entry for entry in spec.manifest.tensors}
    missing = []
    for owner, attribute, name in _slots(model):
        entry = tensors.get(name)
        if entry is None:
            if attribute == "num_batches_tracked":
                continue  # counts training batches; older files lack it and inference ignores it
            missing.append(name)
        elif any(span.start <= entry.offset < span.end for span in spans):
            _assign(owner, attribute, _view(flat, entry, dtype))
    if missing:
        shown = ", ".join(sorted(missing)[:8])
        raise UnsupportedModel(f"the image lacks {len(missing)} tensors of the model: {shown}")
    for owner, attribute, buffer in _unsaved_buffers(model):
        owner._buffers[attribute] = _computed_buffer(attribute, buffer).to(flat.device)
    return flat.device


def _slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield every parameter and saved buffer: its module, its attribute, its full name."""
    for path, owner in model.named_modules():
        saved = [name for name in owner._buffers if name not in owner._non_persistent_buffers_set]
        for attribute in (*owner._parameters, *saved):
            if getattr(owner, attribute) is not None:
                yield owner, attribute, f"{path}.{attribute}" if path else attribute


def _unsaved_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for _, owner in model.named_modules():
        for attribute in owner._non_persistent_buffers_set:
            buffer = owner._buffers[attribute]
            if buffer is not None:
                yield owner, attribute, buffer


def _computed_buffer(attribute: str, meta: torch.Tensor) -> torch.Tensor:
    """Return a buffer that no checkpoint holds, computed: on the meta device it would have no values."""
    if attribute == "position_ids":
        return torch.arange(meta.shape[-1]).expand(meta.shape)
    if attribute == "token_type_ids":
        return torch.zeros(meta.shape, dtype=torch.long)
    raise UnsupportedModel(f"the model has a buffer {attribute!r} that this engine cannot compute")


def _assign(owner: nn.Module, attribute: str, view: torch.Tensor) -> None:
    meta = getattr(owner, attribute)
    if tuple(meta.shape) != tuple(view.shape):
        raise UnsupportedModel(
            f"{type(owner).__name__}.{attribute} has shape {tuple(view.shape)} in the image, "
            f"but config.json implies {tuple(meta.shape)}"
        )
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(view, requires_grad=False)
    else:
        owner._buffers[attribute] = view


def _view(flat: torch.Tensor, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    stored = _STORED.get(entry.dtype)
    if stored is None or (stored.is_floating_point and stored != dtype):
        raise UnsupportedModel(
            f"{entry.name} is stored as {entry.dtype}, but the model runs in {dtype}; "
            "pack the checkpoint in the dtype to run in"
        )
    if entry.nbytes != prod(entry.shape) * stored.itemsize or entry.offset % stored.itemsize:
        raise UnsupportedModel(
            f"{entry.name} does not have the offset and size that its shape and dtype imply"
        )
    return flat[entry.offset : entry.offset + entry.nbytes].view(stored).view(entry.shape)
