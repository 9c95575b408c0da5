"""The encoders' towers: embedding, layers and head of each architecture, run one by one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    DistilBertConfig,
    DistilBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedConfig,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTForImageClassification,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputs:
    """One batch: padded `token_ids` [n, t] with their `mask` (1 for a token), or `pixels` [n, 3, h, w]."""

    token_ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    pixels: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """The state between layers or stages: `hidden`, and MPNet's `bias`, which all layers share."""

    hidden: torch.Tensor
    bias: torch.Tensor | None = None


class Tower(Protocol):
    """One stack of layers. `embed` makes the first carry, `head` turns the last one into the result."""

    @property
    def depth(self) -> int: ...

    def embed(self, inputs: EncoderInputs) -> Carry: ...

    def attention_mask(self, inputs: EncoderInputs, carry: Carry) -> torch.Tensor | None:
        """Return the mask in the form that `layer` takes; computed once for a run of layers."""
        ...

    def layer(self, index: int, carry: Carry, mask: torch.Tensor | None) -> Carry: ...

    def head(self, inputs: EncoderInputs, carry: Carry) -> torch.Tensor: ...


class _TextTower:
    """BERT and similar models: the last hidden states are the result, pooling follows."""

    def __init__(self, model: Any, layers: Sequence[nn.Module]) -> None:
        self._model = model
        self._layers = layers

    @property
    def depth(self) -> int:
        return len(self._layers)

    def embed(self, inputs: EncoderInputs) -> Carry:
        return Carry(hidden=self._model.embeddings(input_ids=inputs.token_ids))

    def attention_mask(self, inputs: EncoderInputs, carry: Carry) -> torch.Tensor | None:
        mask: torch.Tensor | None = create_bidirectional_mask(
            config=self._model.config, inputs_embeds=carry.hidden, attention_mask=inputs.mask
        )
        return mask

    def layer(self, index: int, carry: Carry, mask: torch.Tensor | None) -> Carry:
        return Carry(hidden=self._layers[index](carry.hidden, mask))

    def head(self, inputs: EncoderInputs, carry: Carry) -> torch.Tensor:
        return carry.hidden


class _MpnetTower(_TextTower):
    """MPNet: layers share a relative position bias, the weights of which belong to the embedding."""

    def embed(self, inputs: EncoderInputs) -> Carry:
        hidden = self._model.embeddings(input_ids=inputs.token_ids)
        return Carry(hidden=hidden, bias=self._model.encoder.compute_position_bias(hidden))

    def layer(self, index: int, carry: Carry, mask: torch.Tensor | None) -> Carry:
        hidden = self._layers[index](carry.hidden, mask, position_bias=carry.bias)[0]
        return Carry(hidden=hidden, bias=carry.bias)


class _ClipTextTower:
    """CLIP's text tower: causal, pooled at the end-of-text token, projected."""

    def __init__(self, model: Any) -> None:
        self._text = model.text_model
        self._projection = model.text_projection

    @property
    def depth(self) -> int:
        return len(self._text.encoder.layers)

    def embed(self, inputs: EncoderInputs) -> Carry:
        return Carry(hidden=self._text.embeddings(input_ids=inputs.token_ids))

    def attention_mask(self, inputs: EncoderInputs, carry: Carry) -> torch.Tensor | None:
        mask: torch.Tensor | None = create_causal_mask(
            config=self._text.config,
            inputs_embeds=carry.hidden,
            attention_mask=inputs.mask,
            past_key_values=None,
        )
        return mask

    def layer(self, index: int, carry: Carry, mask: torch.Tensor | None) -> Carry:
        # The layer's attention is causal by itself where no mask is needed for padding.
        return Carry(hidden=self._text.encoder.layers[index](carry.hidden, mask, is_causal=True))

    def head(self, inputs: EncoderInputs, carry: Carry) -> torch.Tensor:
        assert inputs.token_ids is not None and inputs.mask is not None
        hidden = self._text.final_layer_norm(carry.hidden)
        ids = inputs.token_ids
        end = self._text.config.eos_token_id
        if end == 2:
            # Configurations of CLIP's first releases name a wrong token; its end-of-text is the highest id.
            position = (ids * inputs.mask).argmax(dim=-1)
        else:
            position = ((ids == end) & inputs.mask.bool()).int().argmax(dim=-1)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        features: torch.Tensor = self._projection(hidden[rows, position])
        return features


@dataclass(frozen=True, slots=True, eq=False)
class _ImageTower:
    """Vision transformers: no mask; the class token carries the result."""

    stem: Callable[[torch.Tensor], torch.Tensor]
    layers: Sequence[nn.Module]
    top: Callable[[torch.Tensor], torch.Tensor]
    weight: Callable[[], torch.Tensor]

    @property
    def depth(self) -> int:
        return len(self.layers)

    def embed(self, inputs: EncoderInputs) -> Carry:
        assert inputs.pixels is not None
        return Carry(hidden=self.stem(inputs.pixels.to(self.weight().dtype)))

    def attention_mask(self, inputs: EncoderInputs, carry: Carry) -> torch.Tensor | None:
        return None

    def layer(self, index: int, carry: Carry, mask: torch.Tensor | None) -> Carry:
        return Carry(hidden=self.layers[index](carry.hidden, mask))

    def head(self, inputs: EncoderInputs, carry: Carry) -> torch.Tensor:
        return self.top(carry.hidden)


class _ResNetTower(_ImageTower):
    """ResNet: its layers are the blocks of all stages, in order."""

    def layer(self, index: int, carry: Carry, mask: torch.Tensor | None) -> Carry:
        return Carry(hidden=self.layers[index](carry.hidden))


def _bert_towers(model: Any) -> dict[str, Tower]:
    return {"": _TextTower(model, model.encoder.layer)}


def _distilbert_towers(model: Any) -> dict[str, Tower]:
    return {"": _TextTower(model, model.transformer.layer)}


def _mpnet_towers(model: Any) -> dict[str, Tower]:
    return {"": _MpnetTower(model, model.encoder.layer)}


def _vit_towers(model: Any) -> dict[str, Tower]:
    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model.classifier(model.vit.layernorm(hidden)[:, 0, :])
        return logits

    patches = model.vit.embeddings.patch_embeddings.projection
    return {"": _ImageTower(model.vit.embeddings, model.vit.layers, head, lambda: patches.weight)}


def _resnet_towers(model: Any) -> dict[str, Tower]:
    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model.classifier(model.resnet.pooler(hidden))
        return logits

    blocks = [block for stage in model.resnet.encoder.stages for block in stage.layers]
    stem = model.resnet.embedder.embedder.convolution
    return {"": _ResNetTower(model.resnet.embedder, blocks, head, lambda: stem.weight)}


def _clip_towers(model: Any) -> dict[str, Tower]:
    vision = model.vision_model

    def embed(pixels: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = vision.pre_layrnorm(vision.embeddings(pixels))
        return hidden

    def head(hidden: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = model.visual_projection(vision.post_layernorm(hidden[:, 0, :]))
        return features

    patches = vision.embeddings.patch_embedding
    return {
        "text": _ClipTextTower(model),
        "vision": _ImageTower(embed, vision.encoder.layers, head, lambda: patches.weight),
    }


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """The construction and execution of one architecture.

    `prefix` is the base model's optional name prefix in a file. `kinds` maps a kind of Compute to the tower
    that computes it.
    """

    config: type[PreTrainedConfig]
    build: Callable[[Any], nn.Module]
    towers: Callable[[Any], dict[str, Tower]]
    kinds: Mapping[str, str]
    prefix: str = ""


def _without_pooler(model: Callable[..., nn.Module]) -> Callable[[Any], nn.Module]:
    return lambda config: model(config, add_pooling_layer=False)


_EMBED = {"embed": ""}
_CLASSIFY = {"classify": ""}

ENCODERS: Mapping[str, EncoderFamily] = {
    "BertModel": EncoderFamily(BertConfig, _without_pooler(BertModel), _bert_towers, _EMBED, prefix="bert."),
    "RobertaModel": EncoderFamily(
        RobertaConfig, _without_pooler(RobertaModel), _bert_towers, _EMBED, prefix="roberta."
    ),
    "XLMRobertaModel": EncoderFamily(
        XLMRobertaConfig, _without_pooler(XLMRobertaModel), _bert_towers, _EMBED, prefix="roberta."
    ),
    "MPNetModel": EncoderFamily(
        MPNetConfig, _without_pooler(MPNetModel), _mpnet_towers, _EMBED, prefix="mpnet."
    ),
    "DistilBertModel": EncoderFamily(
        DistilBertConfig, DistilBertModel, _distilbert_towers, _EMBED, prefix="distilbert."
    ),
    "ViTForImageClassification": EncoderFamily(ViTConfig, ViTForImageClassification, _vit_towers, _CLASSIFY),
    "ResNetForImageClassification": EncoderFamily(
        ResNetConfig, ResNetForImageClassification, _resnet_towers, _CLASSIFY
    ),
    "CLIPModel": EncoderFamily(
        CLIPConfig, CLIPModel, _clip_towers, {"text_features": "text", "image_features": "vision"}
    ),
}
