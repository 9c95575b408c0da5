"""Synthetic."""

from benchmarks.harness.traces import TraceRequest

SYNTHETIC = "synthetic-burstgpt"


def synthetic_trace(seed: int) -> list[TraceRequest]:
    return [TraceRequest(float(seed), 1, 1)]
