"""The encoder engine: embeddings, logits and features, for a whole model or a range of its layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from invoker.engine.contract import DeviceRegion, ModelSpec, UnsupportedModel
from invoker.engine.decoder_models import parse_config
from invoker.engine.encoders.batches import (
    EncoderBatch,
    InvalidInput,
    TextLimits,
    image_batches,
    text_batches,
)
from invoker.engine.encoders.towers import ENCODERS, Carry, EncoderFamily, EncoderInputs, Tower
from invoker.engine.encoders.weights import bind
from registry.images.manifest import LayerSpan, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpan:
    """A tower's layers `[first, last)`, counted over the whole image."""

    tower: str
    first: int
    last: int


def is_encoder(architecture: str) -> bool:
    """Return whether EncoderEngine runs the architecture."""
    return architecture in ENCODERS


def tower_spans(manifest: Manifest) -> tuple[TowerSpan, ...]:
    """Return the towers in the image's order; each begins with an `embed` step."""
    spans: list[TowerSpan] = []
    layers = 0
    for step in manifest.layers:
        if step.kind == "embed":
            spans.append(TowerSpan(tower=step.tower, first=layers, last=layers))
        elif step.kind == "layer":
            layers += 1
            spans[-1] = TowerSpan(tower=spans[-1].tower, first=spans[-1].first, last=layers)
    return tuple(spans)


def steps_for_range(manifest: Manifest, first: int, last: int) -> tuple[LayerSpan, ...]:
    """Return the steps that the layers `[first, last)` need.

    A tower's embedding belongs to its first layer and its head to its last.
    """
    towers = iter(tower_spans(manifest))
    steps: list[LayerSpan] = []
    layer = 0
    for step in manifest.layers:
        if step.kind == "embed":
            tower = next(towers)
            needed = first <= tower.first < last
        elif step.kind == "layer":
            needed = first <= layer < last
            layer += 1
        else:
            needed = first < tower.last <= last
        if needed:
            steps.append(step)
    return tuple(steps)


class EncoderEngine:
    """A ComputeEngine with weights that are views into `region`.

    Layers are counted over the whole image: CLIP's vision tower follows its text tower, a ResNet's blocks are
    its layers. An engine for a part of them offers `forward_range` only.
    """

    def __init__(self, spec: ModelSpec, region: DeviceRegion, device: str) -> None:
        self._family = _family(spec.manifest.architecture)
        config = _parse_config(self._family, spec)
        total = spec.manifest.num_layers
        self._first, self._last = spec.layers or (0, total)
        if not 0 <= self._first < self._last <= total:
            raise UnsupportedModel(f"layers [{self._first}, {self._last}) of a model with {total}")
        try:
            with torch.device("meta"):
                model: Any = self._family.build(config)
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
            raise UnsupportedModel(f"config.json: {error}") from error
        steps = steps_for_range(spec.manifest, self._first, self._last)
        self._device = bind(model, spec, region, self._family.prefix, steps)
        if self._device.type != torch.device(device).type:
            raise UnsupportedModel(f"the region is on {self._device}, the engine is for {device}")
        self._model: Any = model.eval()
        self._towers: dict[str, Tower] = self._family.towers(model)
        self._spans = {span.tower: span for span in tower_spans(spec.manifest)}
        for name, tower in self._towers.items():
            span = self._spans.get(name)
            if span is None or span.last - span.first != tower.depth:
                raise UnsupportedModel(
                    "the image's layers do not match config.json: pack the checkpoint again"
                )
        self._text = TextLimits.from_config(spec.manifest.architecture, config)
        self._vision: Any = getattr(config, "vision_config", config)

    def __repr__(self) -> str:
        return f"<EncoderEngine {', '.join(self._family.kinds)}, layers [{self._first}, {self._last})>"

    def compute(
        self,
        kind: str,
        token_ids: Sequence[Sequence[int]],
        pixels: np.ndarray | None,
        pooling: str,
        normalize: bool,
    ) -> dict[str, np.ndarray]:
        """Run one forward; results are float32, in the order of the inputs. Raises InvalidInput.

        `pooling` and `normalize` apply to `embed` alone: features are returned as the model computes them.
        """
        if kind not in self._family.kinds:
            raise InvalidInput(f"this model computes {' and '.join(self._family.kinds)}, not {kind}")
        if pooling not in ("mean", "cls"):
            raise InvalidInput(f"pooling must be mean or cls, not {pooling!r}")
        span = self._spans[self._family.kinds[kind]]
        if not (self._first <= span.first and span.last <= self._last):
            raise InvalidInput(f"this engine has only the layers [{self._first}, {self._last})")
        name = {"embed": "embeddings", "classify": "logits"}.get(kind, "features")
        results: dict[int, np.ndarray] = {}
        with torch.inference_mode():
            for batch in self._batches(kind, token_ids, pixels):
                out = self.forward_range(batch.inputs, None, span.first, span.last).hidden
                if kind == "embed":
                    out = _pool(out, batch.inputs, pooling, normalize)
                results.update(zip(batch.rows, out.float().cpu().numpy(), strict=True))
        return {name: np.stack([results[row] for row in range(len(results))])}

    def forward_range(self, inputs: EncoderInputs, carry: Carry | None, first: int, last: int) -> Carry:
        """Run the layers `[first, last)` of one tower on the carry of the layers before.

        `carry` is None where `first` is the tower's first layer; after its last layer the carry holds the
        tower's result. Any partition of a tower's layers yields the same bits.
        """
        span = next((s for s in self._spans.values() if s.first <= first and last <= s.last), None)
        if span is None or not self._first <= first < last <= self._last:
            raise InvalidInput(f"layers [{first}, {last}) are not a range of one tower of {self!r}")
        if (carry is None) != (first == span.first):
            raise InvalidInput("a carry belongs to every range but a tower's first")
        tower = self._towers[span.tower]
        with torch.inference_mode():
            state = carry if carry is not None else tower.embed(inputs)
            mask = tower.attention_mask(inputs, state)
            for index in range(first - span.first, last - span.first):
                state = tower.layer(index, state, mask)
            return Carry(hidden=tower.head(inputs, state)) if last == span.last else state

    def close(self) -> None:
        """Release the region: no view of it is left."""
        self._model, self._towers = None, {}

    def _batches(
        self, kind: str, token_ids: Sequence[Sequence[int]], pixels: np.ndarray | None
    ) -> Iterator[EncoderBatch]:
        if kind in ("embed", "text_features"):
            assert self._text is not None
            return text_batches(token_ids, self._text, self._device)
        size = getattr(self._vision, "image_size", None)
        pair = None if size is None else (size, size) if isinstance(size, int) else (size[0], size[1])
        return image_batches(pixels, self._vision.num_channels, pair, self._device)


def _family(architecture: str) -> EncoderFamily:
    if architecture not in ENCODERS:
        raise UnsupportedModel(f"{architecture} is not an encoder that this engine runs")
    return ENCODERS[architecture]


def _parse_config(family: EncoderFamily, spec: ModelSpec) -> Any:
    config = parse_config(family.config, spec.config)
    if getattr(config, "is_decoder", False):
        raise UnsupportedModel("an encoder configured as a decoder is not supported")
    return config


def _pool(hidden: torch.Tensor, inputs: EncoderInputs, pooling: str, normalize: bool) -> torch.Tensor:
    """Return one float32 vector a text, `[n, hidden]`: the mean over its tokens, or the first token's."""
    assert inputs.mask is not None
    hidden = hidden.float()
    if pooling == "mean":
        mask = inputs.mask.unsqueeze(-1).to(hidden.dtype)
        vector = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    else:
        vector = hidden[:, 0]
    return torch.nn.functional.normalize(vector, dim=-1) if normalize else vector
