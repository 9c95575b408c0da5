"""The choice of layer implementation: fused modules or Hugging Face's."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from registry.images.manifest import TensorEntry

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_FUSED_IN_CHECKPOINT = frozenset({"Phi3ForCausalLM"})
FUSIBLE = _FUSED_IN_CHECKPOINT | {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}


class LayerPath(StrEnum):
    """The implementation of the layers; AUTO selects the fused modules where they apply."""

    AUTO = "auto"
    FUSED = "fused"
    HUGGING_FACE = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathChoice:
    """The selected implementation, and the reason."""

    path: LayerPath
    reason: str


def choose_path(
    wanted: LayerPath,
    architecture: str,
    config: Any,
    entries: Mapping[str, TensorEntry],
    layers: Iterable[int],
) -> PathChoice:
    """Select the implementation for these layers."""
    if wanted is LayerPath.HUGGING_FACE:
        return PathChoice(path=wanted, reason="it was requested")
    obstacle = _obstacle(architecture, config, entries, layers)
    if obstacle:
        return PathChoice(path=LayerPath.HUGGING_FACE, reason=obstacle)
    return PathChoice(path=LayerPath.FUSED, reason="q|k|v and gate|up are views of the image")


def name_prefix(entries: Collection[str]) -> str:
    """Return what the names of the Llama family's tensors begin with: "" for a bare base model."""
    return "" if "embed_tokens.weight" in entries else "model."


def _obstacle(
    architecture: str, config: Any, entries: Mapping[str, TensorEntry], layers: Iterable[int]
) -> str:
    """Return why the fused modules cannot be used, "" if they can."""
    if architecture not in FUSIBLE:
        return f"there are no fused modules for {architecture}"
    if config.hidden_act != "silu":
        return f"the fused modules compute SiLU, not {config.hidden_act}"
    if architecture in _FUSED_IN_CHECKPOINT:
        return ""
    for index in layers:
        prefix = f"{name_prefix(entries)}layers.{index}."
        for modules in (QKV, GATE_UP):
            for kind in ("weight", "bias"):
                names = [f"{prefix}{module}.{kind}" for module in modules]
                gap = _gap([entries[name] for name in names if name in entries])
                if gap:
                    return gap
    return ""


def _gap(entries: Sequence[TensorEntry]) -> str:
    """Return which tensors that should be adjacent are not, "" if all are."""
    for one, following in pairwise(entries):
        if one.offset + one.nbytes != following.offset:
            return f"{one.name} and {following.name} are not adjacent"
    return ""
