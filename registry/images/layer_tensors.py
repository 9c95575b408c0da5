"""The tensor names of each model family, step by step, in the order of execution.

A step's names are listed so that q, k and v, and gate and up, follow each other, weights before biases: where
their sizes are multiples of the alignment, each fused matrix is one view of the image. A name that ends in
`?` is optional.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from registry.errors import CheckpointError

Config = Mapping[str, object]
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One step of execution (see LayerSpan) and the names of its tensors, in order."""

    kind: str
    index: int
    tower: str
    names: tuple[str, ...]


def embed(*names: str, tower: str = "") -> LayerTensors:
    return LayerTensors(kind="embed", index=0, tower=tower, names=names)


def layer(index: int, names: Iterable[str], tower: str = "") -> LayerTensors:
    return LayerTensors(kind="layer", index=index, tower=tower, names=tuple(names))


def head(*names: str, tower: str = "") -> LayerTensors:
    return LayerTensors(kind="head", index=0, tower=tower, names=names)


def count(config: Config, key: str, default: int) -> int:
    """Return a count from config.json, bounded, as it is unvalidated input."""
    value = config.get(key, default)
    if type(value) is not int or not 0 <= value <= MAX_LAYERS:
        raise CheckpointError(f"config.json: {key} must be an integer of 0 to {MAX_LAYERS}, not {value!r}")
    return value


def counts(config: Config, key: str, default: list[int]) -> list[int]:
    """Return a list of counts from config.json, bounded."""
    value = config.get(key, default)
    if (
        not isinstance(value, list)
        or len(value) > 64
        or not all(type(item) is int and 0 <= item <= 1 << 20 for item in value)
    ):
        raise CheckpointError(f"config.json: {key} must be a short list of integers of 0 or more")
    return value


def section(config: Config, key: str) -> Config:
    """Return a nested object of config.json, empty where absent."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {key} must be an object")
    return value


def _affine(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}.{kind}" for module in modules for kind in ("weight", "bias"))


def _grouped(prefix: str, *modules: str, bias: bool = True) -> tuple[str, ...]:
    """Return the names of modules that fuse: all weights, then all biases."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(f"{prefix}{module}.{kind}" for kind in kinds for module in modules)


def _layers(stack: str, layers: int, names: Iterable[str], tower: str = "") -> list[LayerTensors]:
    """Return the steps of a stack of equal layers."""
    return [layer(i, (f"{stack}.{i}.{name}" for name in names), tower) for i in range(layers)]


# --- text encoders --------------------------------------------------------------------------------


def bert_parts(config: Config, prefix: str) -> list[LayerTensors]:
    """Return the steps of BERT and RoBERTa; the pooler is optional."""
    names = (
        *_grouped("attention.self.", "query", "key", "value"),
        *_affine("attention.output.dense", "attention.output.LayerNorm"),
        *_affine("intermediate.dense", "output.dense", "output.LayerNorm"),
    )
    embeddings = _embeddings(prefix, "word", "position", "token_type")
    layers = _layers(f"{prefix}encoder.layer", count(config, "num_hidden_layers", 12), names)
    return _encoder(prefix, embeddings, layers)


def mpnet_parts(config: Config, prefix: str) -> list[LayerTensors]:
    """Return the steps of MPNet; all layers share the relative attention bias, stored with the embedding."""
    names = (
        *_grouped("attention.attn.", "q", "k", "v"),
        *_affine("attention.attn.o", "attention.LayerNorm"),
        *_affine("intermediate.dense", "output.dense", "output.LayerNorm"),
    )
    bias = f"{prefix}encoder.relative_attention_bias.weight"
    layers = _layers(f"{prefix}encoder.layer", count(config, "num_hidden_layers", 12), names)
    return _encoder(prefix, (*_embeddings(prefix, "word", "position"), bias), layers)


def distilbert_parts(config: Config, prefix: str) -> list[LayerTensors]:
    names = (
        *_grouped("attention.", "q_lin", "k_lin", "v_lin"),
        *_affine("attention.out_lin", "sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
    )
    layers = _layers(f"{prefix}transformer.layer", count(config, "n_layers", 6), names)
    return _encoder(prefix, _embeddings(prefix, "word", "position"), layers)


def _embeddings(prefix: str, *kinds: str) -> tuple[str, ...]:
    tables = (f"{prefix}embeddings.{kind}_embeddings.weight" for kind in kinds)
    return (*tables, *_affine(f"{prefix}embeddings.LayerNorm"))


def _encoder(prefix: str, embeddings: Iterable[str], layers: list[LayerTensors]) -> list[LayerTensors]:
    pooler = head(f"{prefix}pooler.dense.weight?", f"{prefix}pooler.dense.bias?")
    return [embed(*embeddings), *layers, pooler]


# --- vision ---------------------------------------------------------------------------------------


def vit_parts(config: Config, prefix: str) -> list[LayerTensors]:
    bias = bool(config.get("qkv_bias", True))
    names = (
        *_affine("layernorm_before"),
        *_grouped("attention.attention.", "query", "key", "value", bias=bias),
        *_affine("attention.output.dense", "layernorm_after", "intermediate.dense", "output.dense"),
    )
    return [
        embed(
            f"{prefix}embeddings.cls_token",
            f"{prefix}embeddings.position_embeddings",
            *_affine(f"{prefix}embeddings.patch_embeddings.projection"),
        ),
        *_layers(f"{prefix}encoder.layer", count(config, "num_hidden_layers", 12), names),
        head(*_affine(f"{prefix}layernorm", "classifier")),
    ]


def resnet_parts(config: Config, prefix: str) -> list[LayerTensors]:
    """Return the steps of ResNet: `tower` is the stage, `index` the block within it."""
    depths = counts(config, "depths", [3, 4, 6, 3])
    widths = counts(config, "hidden_sizes", [256, 512, 1024, 2048])
    if not depths or len(depths) != len(widths) or max(depths) > MAX_LAYERS:
        raise CheckpointError("config.json: depths and hidden_sizes must name the same stages")
    convolutions = 2 if config.get("layer_type", "bottleneck") == "basic" else 3
    narrow = count(config, "embedding_size", 64) == widths[0] and not config.get("downsample_in_first_stage")
    parts = [embed(*_normalised(f"{prefix}embedder.embedder"))]
    for stage, depth in enumerate(depths):
        for block in range(depth):
            base = f"{prefix}encoder.stages.{stage}.layers.{block}"
            # Only a stage's first block changes the shape, and the first stage's only where it must.
            shortcut = block == 0 and not (stage == 0 and narrow)
            modules = [f"{base}.layer.{i}" for i in range(convolutions)]
            if shortcut:
                modules.insert(0, f"{base}.shortcut")
            names = (name for module in modules for name in _normalised(module))
            parts.append(layer(block, names, tower=f"stage{stage}"))
    return [*parts, head("classifier.1.weight", "classifier.1.bias")]


def _normalised(module: str) -> tuple[str, ...]:
    """Return the names of a convolution and its batch normalisation; only training needs the batch count."""
    return (
        f"{module}.convolution.weight",
        *(f"{module}.normalization.{kind}" for kind in ("weight", "bias", "running_mean", "running_var")),
        f"{module}.normalization.num_batches_tracked?",
    )


def clip_parts(config: Config, prefix: str) -> list[LayerTensors]:
    """Return the steps of CLIP: the text tower, then the vision tower, each with its projection."""
    names = (
        *_affine("layer_norm1"),
        *_grouped("self_attn.", "q_proj", "k_proj", "v_proj"),
        *_affine("self_attn.out_proj", "layer_norm2", "mlp.fc1", "mlp.fc2"),
    )

    def layers(tower: str) -> list[LayerTensors]:
        layer_count = count(section(config, f"{tower}_config"), "num_hidden_layers", 12)
        return _layers(f"{prefix}{tower}_model.encoder.layers", layer_count, names, tower)

    text, vision = f"{prefix}text_model", f"{prefix}vision_model"
    return [
        embed(
            f"{text}.embeddings.token_embedding.weight",
            f"{text}.embeddings.position_embedding.weight",
            tower="text",
        ),
        *layers("text"),
        head(*_affine(f"{text}.final_layer_norm"), f"{prefix}text_projection.weight", tower="text"),
        embed(
            f"{vision}.embeddings.class_embedding",
            f"{vision}.embeddings.patch_embedding.weight",
            f"{vision}.embeddings.position_embedding.weight",
            *_affine(f"{vision}.pre_layrnorm"),
            tower="vision",
        ),
        *layers("vision"),
        head(
            *_affine(f"{vision}.post_layernorm"),
            f"{prefix}visual_projection.weight",
            f"{prefix}logit_scale",
            tower="vision",
        ),
    ]
