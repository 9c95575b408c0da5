"""Making the engine that an architecture needs, and how much memory it takes."""

from collections.abc import Mapping
from dataclasses import replace

from invoker.engine.contract import ComputeEngine, DeviceRegion, GenerateEngine, ModelSpec
from invoker.engine.decoder import DecoderEngine
from invoker.engine.encoders import EncoderEngine, is_encoder
from invoker.engine.families import FAMILIES, family_of, geometry_of, parse_config
from invoker.engine.image_views import compute_dtype
from invoker.engine.kv_cache import KvShape, pages_for
from invoker.engine.paths import LayerPath


def is_decoder(architecture: str) -> bool:
    """Whether the architecture generates tokens, hence needs a KV cache."""
    return architecture in FAMILIES


def kv_bytes_needed(
    architecture: str,
    config: Mapping[str, object],
    dtype: str,
    context_length: int,
    sequences: int,
    layers: int | None = None,
) -> int:
    """The KV cache for `sequences` sequences of `context_length` tokens at once, of all layers or of so many
    in a stage; 0 for encoders."""
    if not is_decoder(architecture):
        return 0
    shape, longest = _kv_shape(architecture, config, dtype)
    if layers is not None:
        shape = replace(shape, layers=layers)
    return sequences * pages_for(min(context_length, longest)) * shape.page_bytes


def make_engine(
    spec: ModelSpec,
    region: DeviceRegion,
    kv: DeviceRegion | int,
    *,
    max_sequences: int = 64,
    prefill_budget: int = 512,
    path: LayerPath = LayerPath.AUTO,
) -> GenerateEngine | ComputeEngine:
    """The engine for the spec's architecture, its weights bound to `region`. Raises UnsupportedModel.

    `kv` is the memory for the KV cache, a region or a number of bytes; encoders use none.
    `path` is for decoders: see invoker/engine/paths.py.
    """
    if is_encoder(spec.manifest.architecture):
        return EncoderEngine(spec, region, region.device)
    return DecoderEngine(
        spec, region, kv, max_sequences=max_sequences, prefill_budget=prefill_budget, path=path
    )


def _kv_shape(architecture: str, config: Mapping[str, object], dtype: str) -> tuple[KvShape, int]:
    """The shape of the KV cache, and how many tokens a sequence may have at most."""
    geometry = geometry_of(parse_config(family_of(architecture), config))
    shape = KvShape(
        layers=geometry.layers,
        heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=compute_dtype(dtype),
    )
    return shape, geometry.longest
