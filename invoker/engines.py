"""Making engines: the seam between the node and what runs models, and the real one."""

from typing import Protocol

from invoker.engine.contract import ComputeEngine, DeviceRegion, GenerateEngine, ModelSpec
from invoker.engine.factory import kv_bytes_needed, make_engine
from invoker.kv_budget import TYPICAL_TOKENS

MIN_SEQUENCES = 64


class Engines(Protocol):
    """Both methods block and may be called from any thread. They raise EngineError."""

    def kv_bytes(self, spec: ModelSpec, max_concurrency: int) -> tuple[int, int]:
        """The least and the wanted size of the KV cache; zeros for an encoder."""
        ...

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine | ComputeEngine: ...


class RealEngines:
    """Engines of invoker/engine."""

    def kv_bytes(self, spec: ModelSpec, max_concurrency: int) -> tuple[int, int]:
        def needed(tokens: int, sequences: int) -> int:
            return kv_bytes_needed(spec.manifest.architecture, spec.config, spec.dtype, tokens, sequences)

        typical = min(spec.context_length, TYPICAL_TOKENS)
        return needed(spec.context_length, 1), needed(typical, max(1, max_concurrency))

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine | ComputeEngine:
        # Gateways send more than that for tenants that have less than their share.
        sequences = max(MIN_SEQUENCES, 2 * max_concurrency)
        return make_engine(spec, region, 0 if kv is None else kv, max_sequences=sequences)
