"""Engine factories: the seam between a node and model execution, and the torch implementation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from invoker.engine.contract import (
    ComputeEngine,
    DeviceRegion,
    GenerateEngine,
    ModelSpec,
    UnsupportedModel,
)
from invoker.engine.decoder import DecoderEngine
from invoker.engine.decoder_models import is_decoder
from invoker.engine.encoders.engine import EncoderEngine, is_encoder
from invoker.engine.geometry import geometry_of
from invoker.engine.grammars import Grammars
from invoker.engine.image_views import compute_dtype, is_aligned
from invoker.engine.kv.budget import TYPICAL_TOKENS
from invoker.engine.kv.cache import pages_for
from invoker.engine.stage_contract import Stage
from invoker.engine.stage_engine import StageEngine
from invoker.engine.weights import bind
from registry.config.emulation import is_emulated

MIN_SEQUENCES = 64


def max_sequences_for(max_concurrency: int) -> int:
    """Return the sequences of an engine; gateways over-commit for tenants with less than their share."""
    return max(MIN_SEQUENCES, 2 * max_concurrency)


class EngineFactory(Protocol):
    """Builds the engines of a node.

    All methods block and may be called from any thread. They raise EngineError.
    """

    def kv_bytes(self, spec: ModelSpec, max_concurrency: int) -> tuple[int, int]:
        """Return the minimum and the wanted KV cache size of the spec's layers; zeros for an encoder."""
        ...

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine | ComputeEngine: ...

    def add_tokenizer(self, digest: str, content: bytes) -> None:
        """Keep a tokenizer.json for sequences with a grammar."""
        ...

    def check(self, spec: ModelSpec) -> None:
        """Raise UnsupportedModel if there is no engine for the model; no bytes of the image are read."""
        ...

    def binds_early(self, spec: ModelSpec) -> bool:
        """Return whether `make` reads no bytes of the image, so that it may be called before they arrive."""
        ...

    def make_stage(self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None) -> Stage:
        """Return the stage of the layers `spec.layers`; only their bytes must have arrived in the region."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoMemory:
    """A DeviceRegion without memory, on torch's meta device."""

    nbytes: int
    pointer: int = 0
    device: str = "meta"
    buffer: memoryview | None = None


class TorchEngineFactory:
    """The factory of torch engines."""

    def __init__(self) -> None:
        self._grammars = Grammars()

    def add_tokenizer(self, digest: str, content: bytes) -> None:
        self._grammars.add_tokenizer(digest, content)

    def kv_bytes(self, spec: ModelSpec, max_concurrency: int) -> tuple[int, int]:
        architecture = spec.manifest.architecture
        if is_emulated(architecture):
            raise UnsupportedModel(f"{architecture} runs on emulated devices only (--device emulated:GPU)")

        def needed(tokens: int, sequences: int) -> int:
            layers = None if spec.layers is None else spec.layers[1] - spec.layers[0]
            return kv_bytes_needed(architecture, spec.config, spec.dtype, tokens, sequences, layers)

        typical = min(spec.context_length, TYPICAL_TOKENS)
        return needed(spec.context_length, 1), needed(typical, max(1, max_concurrency))

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine | ComputeEngine:
        if is_encoder(spec.manifest.architecture):
            return EncoderEngine(spec, region, region.device)
        sequences = max_sequences_for(max_concurrency)
        memory = 0 if kv is None else kv
        return DecoderEngine(spec, region, memory, max_sequences=sequences, grammars=self._grammars)

    def check(self, spec: ModelSpec) -> None:
        region = _NoMemory(nbytes=spec.manifest.nbytes)
        if is_encoder(spec.manifest.architecture):
            EncoderEngine(spec, region, region.device)
        else:
            bind(spec, region)

    def binds_early(self, spec: ModelSpec) -> bool:
        # Its weights are views, but for copies of those that are not aligned.
        return is_decoder(spec.manifest.architecture) and all(map(is_aligned, spec.manifest.tensors))

    def make_stage(self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None) -> Stage:
        return StageEngine(spec, region, 0 if kv is None else kv, grammars=self._grammars)


def kv_bytes_needed(
    architecture: str,
    config: Mapping[str, object],
    dtype: str,
    context_length: int,
    sequences: int,
    layers: int | None = None,
) -> int:
    """Return the bytes of a KV cache for `sequences` sequences of `context_length` tokens at once.

    `layers` is the number of layers of a stage (None: all). 0 for encoders.
    """
    if not is_decoder(architecture):
        return 0
    geometry = geometry_of(architecture, config)
    shape = geometry.kv_shape(geometry.layers if layers is None else layers, compute_dtype(dtype))
    return sequences * pages_for(min(context_length, geometry.longest)) * shape.page_bytes
