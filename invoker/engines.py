"""Making engines: the seam between the node and what runs models, and the real one."""

from typing import Protocol

from invoker.engine.contract import (
    ComputeEngine,
    DeviceRegion,
    GenerateEngine,
    ModelSpec,
    UnsupportedModel,
)
from invoker.engine.factory import is_decoder, kv_bytes_needed, make_engine
from invoker.engine.stage_contract import Stage
from invoker.engine.stage_engine import StageEngine
from invoker.kv_budget import TYPICAL_TOKENS
from registry.emulation import is_emulated

MIN_SEQUENCES = 64


class Engines(Protocol):
    """All methods block and may be called from any thread. They raise EngineError."""

    def kv_bytes(self, spec: ModelSpec, max_concurrency: int) -> tuple[int, int]:
        """The least and the wanted size of the KV cache, of the spec's layers; zeros for an encoder."""
        ...

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine | ComputeEngine: ...

    def binds_early(self, spec: ModelSpec) -> bool:
        """Whether `make` looks at none of the image's bytes, so that it may be called before they arrive."""
        ...

    def make_stage(self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None) -> Stage:
        """The stage of the layers `spec.layers`, whose bytes alone must have arrived in the region."""
        ...


class RealEngines:
    """Engines of invoker/engine."""

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
        # Gateways send more than that for tenants that have less than their share.
        sequences = max(MIN_SEQUENCES, 2 * max_concurrency)
        return make_engine(spec, region, 0 if kv is None else kv, max_sequences=sequences)

    def binds_early(self, spec: ModelSpec) -> bool:
        return is_decoder(spec.manifest.architecture)  # its weights are views

    def make_stage(self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None) -> Stage:
        return StageEngine(spec, region, 0 if kv is None else kv)
