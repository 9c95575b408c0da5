"""Tiny random-weight encoder checkpoints, written as `save_pretrained` does.

`write_encoder("bert", folder)` writes one and returns the model that it was written from; `ENCODERS`
names the kinds. Norms, biases and running statistics are random too, so that a weight bound to the
wrong place changes the result.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CLIPConfig,
    CLIPModel,
    DistilBertConfig,
    DistilBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTForImageClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

VOCABULARY = 99
IMAGE = 16

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_TEXT = {**_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 1}
_VISION = {**_SIZES, "image_size": IMAGE, "patch_size": 4}


def _clip(eos_token_id: int) -> PreTrainedModel:
    text = {**_TEXT, "eos_token_id": eos_token_id, "bos_token_id": 0, "max_position_embeddings": 20}
    vision = {**_VISION, "num_hidden_layers": 2, "hidden_size": 24}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))


def _resnet(layer_type: str) -> PreTrainedModel:
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 32] if layer_type == "basic" else [16, 32, 64],
        depths=[1, 2, 1],
        layer_type=layer_type,
        num_labels=5,
    )
    return ResNetForImageClassification(config)


ENCODERS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertModel(BertConfig(**_TEXT)),
    "bert-masked-lm": lambda: BertForMaskedLM(BertConfig(**_TEXT)),
    "roberta": lambda: RobertaModel(RobertaConfig(**_TEXT)),
    "xlm-roberta-classifier": lambda: XLMRobertaForSequenceClassification(XLMRobertaConfig(**_TEXT)),
    "mpnet": lambda: MPNetModel(MPNetConfig(**_TEXT)),
    "distilbert": lambda: DistilBertModel(
        DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=3, n_heads=2, max_position_embeddings=64
        )
    ),
    "vit": lambda: ViTForImageClassification(ViTConfig(**_VISION, num_labels=7)),
    "vit-no-bias": lambda: ViTForImageClassification(ViTConfig(**_VISION, num_labels=7, qkv_bias=False)),
    "resnet-basic": lambda: _resnet("basic"),
    "resnet-bottleneck": lambda: _resnet("bottleneck"),
    "clip": lambda: _clip(98),
    "clip-old": lambda: _clip(2),
}

TEXT_ENCODERS = ("bert", "bert-masked-lm", "roberta", "xlm-roberta-classifier", "mpnet", "distilbert")
CLASSIFIERS = ("vit", "vit-no-bias", "resnet-basic", "resnet-bottleneck")
TWO_TOWERS = ("clip", "clip-old")


def write_encoder(kind: str, folder: Path, *, seed: int = 0) -> PreTrainedModel:
    """Write the checkpoint and return its model, in evaluation mode."""
    torch.manual_seed(seed)
    model = ENCODERS[kind]()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point():
                continue
            if "running_var" in name or name.endswith("normalization.weight"):
                tensor.uniform_(0.5, 1.5)
            elif "norm" in name.lower() and name.endswith("weight"):
                tensor.uniform_(0.7, 1.3)
            elif tensor.dim() < 2:
                tensor.normal_(std=0.1)
            elif tensor.dim() == 2:
                tensor.normal_(std=0.15)
    model.save_pretrained(folder)
    return model.eval()
