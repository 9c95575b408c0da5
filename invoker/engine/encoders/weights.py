"""Binding: an encoder's modules with weights and buffers that are views into a model image."""

import re
from collections.abc import Iterator

import torch
from torch import nn

from invoker.engine.contract import DeviceRegion, ModelSpec, UnsupportedModel
from invoker.engine.image_views import ImageViews, saved_tensors
from registry.images.manifest import LayerSpan

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
    views = ImageViews(spec, region)
    names = {module_name(name, prefix): name for name in views.entries}
    missing = []
    for owner, attribute, wanted in saved_tensors(model):
        if wanted not in names:
            if attribute != "num_batches_tracked":  # of training; older files lack it
                missing.append(wanted)
        elif any(span.start <= views.entries[names[wanted]].offset < span.end for span in spans):
            views.bind(owner, attribute, names[wanted])
    if missing:
        shown = ", ".join(sorted(missing)[:8])
        raise UnsupportedModel(f"the image lacks {len(missing)} tensors of the model: {shown}")
    for owner, attribute, buffer in _unsaved_buffers(model):
        owner._buffers[attribute] = _computed_buffer(attribute, buffer).to(views.device)
    return views.device


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
