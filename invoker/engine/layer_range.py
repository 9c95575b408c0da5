"""A range of the layers of a transformers decoder, run by the decoder's own code.

Layers outside the range are replaced: those before it return what they get, and the last of them the hidden
states of the previous stage; the one behind it ends the run. Whatever the model does around its layers
(embeddings, positions, multipliers, norms) is its own code, too.
"""

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from invoker.engine.attention import AttentionPlace, CurrentStep, PagedPlace
from invoker.engine.attention_adapters import adapt
from invoker.engine.contract import UnsupportedModel
from invoker.engine.decoder_models import window_of
from invoker.engine.kv.cache import KvPool
from invoker.engine.layout import AttentionMetadata

# A decoder that takes the first item of what its layers return.
_FIRST_OF_PAIR = re.compile(r"\bhidden_states = \w*outputs?\[0\]")
_SOURCES: dict[str, str] = {}  # of the forward of each class: a few for each architecture
_MAX_TABLE_ITEMS = 1 << 26  # of a table that is in no checkpoint, as rotary frequencies


class LayerRange:
    """The layers `[first, last)` of `model`, which is on the meta device; the range owns it from now on.

    `layers_name` is the name of the list of layers in the model.
    """

    def __init__(self, model: PreTrainedModel, first: int, last: int, device: torch.device) -> None:
        self.model = model
        self.first, self.last = first, last
        self.device = device
        self._step = CurrentStep()
        self._base: Any = model.get_decoder()
        self.layers_name, layers = _find_layers(model, self._base, model.config.num_hidden_layers)
        inside = set(layers.modules())
        self._around = {name: module for name, module in model.named_modules() if module not in inside}
        self._pairs = _FIRST_OF_PAIR.search(_source(self._base)) is not None
        for index in range(first, last):
            # Most modules name their window. Where only masks have it, the kinds of layers say which.
            window = window_of(model.config, index) if getattr(model.config, "layer_types", None) else None
            place = PagedPlace(step=self._step, layer=index - first, window=window)
            _place_attention(layers[index], place, device)
        self._layers = layers
        self._entry = _cut(layers, first, last, self._pairs)
        self._output = _GivenOutput()
        _replace(model, self._base, self._output)
        self._takes_positions = "position_ids" in inspect.signature(self._base.forward).parameters
        self._width: int = self._base.get_input_embeddings().embedding_dim
        _compute_tables(model, self._base, device)

    def __repr__(self) -> str:
        return f"<LayerRange {type(self.model).__name__} [{self.first}, {self.last})>"

    def run(
        self,
        inputs: torch.Tensor,
        step: AttentionMetadata,
        pool: KvPool,
        layers: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Return hidden states, `[tokens, hidden]`; behind the last layer they are normed.

        `layers` are those to run (None: all of the range). `inputs` are token ids, `[tokens]`, in front of
        layer 0, else hidden states.
        """
        self._step.metadata, self._step.pool = step, pool
        try:
            if layers in (None, (self.first, self.last)):
                return self._run(inputs, step.positions, self._entry)
            with self._only(*layers) as entry:
                return self._run(inputs, step.positions, entry)
        finally:
            self._step.metadata = self._step.pool = None

    @contextlib.contextmanager
    def _only(self, first: int, last: int) -> Iterator["_Entry | None"]:
        """Cut the range to the layers `[first, last)` for a step; yield where hidden states enter."""
        assert self.first <= first < last <= self.last, f"layers [{first}, {last}) of {self!r}"
        kept = list(self._layers)
        try:
            yield _cut(self._layers, first, last, self._pairs)
        finally:
            for index, layer in enumerate(kept):
                self._layers[index] = layer

    def probe(self, place: AttentionPlace) -> frozenset[str]:
        """Run a range from layer 0 on, on the meta device, with another AttentionPlace that raises.

        Returns the names of the modules that ran until then, in front of the layers.
        """
        ran = set()
        for name, around in self._around.items():
            around.register_forward_pre_hook(lambda *_, name=name: ran.add(name))
        for module in self._base.modules():
            if hasattr(module, "place"):
                module.place = place
        nothing = torch.zeros(1, dtype=torch.long, device="meta")
        with contextlib.suppress(Probed):
            self._run(nothing, nothing, self._entry)
        return frozenset(ran)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, `[rows, vocabulary]`, for rows behind the final norm."""
        self._output.hidden = hidden[None]
        try:
            found: torch.Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits
            return found[0]
        finally:
            self._output.hidden = None

    def _run(self, inputs: torch.Tensor, positions: torch.Tensor, entry: "_Entry | None") -> torch.Tensor:
        options: dict[str, Any] = {"use_cache": False}
        if self._takes_positions:
            options["position_ids"] = positions[None]
        try:
            if entry is None:
                output = self._base(input_ids=inputs[None], **options)
            else:
                entry.hidden = inputs[None]
                ignored = inputs.new_zeros(1).expand(1, len(inputs), self._width)
                output = self._base(inputs_embeds=ignored, **options)
        except _RangeEnded as ended:
            return ended.hidden[0]
        finally:
            if entry is not None:
                entry.__dict__["hidden"] = None
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


class Probed(Exception):
    """Raised by the AttentionPlace of a probe."""


class _RangeEnded(Exception):
    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _OutsideLayer(nn.Module):
    """In the place of a layer outside the range, with the layer's other attributes."""

    def __init__(self, layer: nn.Module, pairs: bool) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: its parameters stay without values
        self._pairs = pairs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def output(self, hidden: torch.Tensor) -> Any:
        return (hidden, None) if self._pairs else hidden


class _Skipped(_OutsideLayer):
    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> Any:
        return self.output(hidden_states)


class _Entry(_OutsideLayer):
    """The layer before the range: returns the hidden states that a previous stage computed."""

    def __init__(self, layer: nn.Module, pairs: bool) -> None:
        super().__init__(layer, pairs)
        self.__dict__["hidden"] = None

    def forward(self, *_: object, **__: object) -> Any:
        return self.output(self.hidden)


class _End(_OutsideLayer):
    """The layer behind the range."""

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> Any:
        raise _RangeEnded(hidden_states)


class _DecoderOutput(BaseModelOutputWithPast):
    """The output of any decoder: what else a model may look for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenOutput(nn.Module):
    """In the place of a decoder: returns what the decoder returned before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: object, **__: object) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=self.hidden)


def _find_layers(model: nn.Module, base: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a decoder's layers. Raises UnsupportedModel."""
    inside = set(base.modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and module in inside and len(module) == count:
            return name, module
    raise UnsupportedModel(f"{type(model).__name__} has no list of {count} layers")


def _place_attention(layer: nn.Module, place: AttentionPlace, device: torch.device) -> None:
    """Give the layer's attention its place. Raises UnsupportedModel unless it has exactly one."""
    found = [module for module in layer.modules() if adapt(module, device) or _dispatches(module)]
    if len(found) != 1:
        raise UnsupportedModel(
            f"a layer of the class {type(layer).__name__} has {len(found)} attention modules which can use "
            "this engine's KV cache, not one"
        )
    if getattr(found[0], "is_causal", True) is False:
        raise UnsupportedModel(f"{type(found[0]).__name__} attends to later tokens: it generates no text")
    found[0].place = place  # type: ignore[assignment]


def _dispatches(module: nn.Module) -> bool:
    """Return whether a module calls transformers' attention interface."""
    return "ALL_ATTENTION_FUNCTIONS" in _source(module)


def _source(module: nn.Module) -> str:
    """Return the source of the forward of a module of transformers, "" for others."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if not kind.startswith("transformers.models."):
        return ""
    if kind not in _SOURCES:
        _SOURCES[kind] = inspect.getsource(inspect.unwrap(type(module).forward))
    return _SOURCES[kind]


def _cut(layers: nn.ModuleList, first: int, last: int, pairs: bool) -> _Entry | None:
    """Replace the layers outside `[first, last)`; return the one by which hidden states enter."""
    entry = _Entry(layers[first - 1], pairs) if first else None
    for index in range(first):
        layers[index] = _Skipped(layers[index], pairs)
    if entry is not None:
        layers[first - 1] = entry
    for index in range(last, len(layers)):
        layers[index] = _End(layers[index], pairs)
    return entry


def _replace(model: nn.Module, module: nn.Module, other: nn.Module) -> None:
    name = next(name for name, found in model.named_modules() if found is module)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, other)


def _compute_tables(model: PreTrainedModel, base: nn.Module, device: torch.device) -> None:
    """Compute the buffers that no checkpoint has: on the meta device they would have no values."""
    for module in (*base.modules(), *model.modules()):
        unsaved = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        found = {name: buffer for name, buffer in unsaved.items() if buffer is not None and buffer.is_meta}
        if not found:
            continue
        if sum(buffer.numel() for buffer in found.values()) > _MAX_TABLE_ITEMS:
            raise UnsupportedModel(f"{type(module).__name__} would compute too large a table")
        for name, buffer in found.items():
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        with torch.no_grad():
            model._init_weights(module)
        for name in found:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = buffer.to(device)


def layer_index(layers_name: str, name: str) -> int | None:
    """Return the layer of a tensor of the model, None if it is around the layers."""
    if not name.startswith(f"{layers_name}."):
        return None
    return int(name.removeprefix(f"{layers_name}.").split(".", 1)[0])
