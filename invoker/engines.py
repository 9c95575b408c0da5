"""Making engines: the seam between the node and what runs models, and the real one."""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

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
        sequences = max(MIN_SEQUENCES, max_concurrency)
        engine = make_engine(spec, region, 0 if kv is None else kv, max_sequences=sequences)
        return engine if hasattr(engine, "step") else TimedCompute(engine)


class TimedArrays(dict[str, np.ndarray]):
    """Output arrays of a forward, and how long it kept the accelerator."""

    elapsed_us: int = 0


class TimedCompute:
    """A ComputeEngine that measures each forward where it runs, so that waiting is not counted."""

    def __init__(self, engine: ComputeEngine) -> None:
        self._engine = engine

    def compute(
        self,
        kind: str,
        token_ids: Sequence[Sequence[int]],
        pixels: np.ndarray | None,
        pooling: str,
        normalize: bool,
    ) -> TimedArrays:
        began_ns = time.perf_counter_ns()
        arrays = TimedArrays(self._engine.compute(kind, token_ids, pixels, pooling, normalize))
        arrays.elapsed_us = (time.perf_counter_ns() - began_ns) // 1000
        return arrays

    def close(self) -> None:
        self._engine.close()
