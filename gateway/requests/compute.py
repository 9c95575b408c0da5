"""Encoder calls: one forward pass each, and the conversion of their arrays."""

import array
import base64
import math
from collections.abc import Sequence
from typing import TypeAlias

from gateway.core.contract import Assigned, DispatchError
from gateway.requests.billed_request import BilledRequest
from gateway.schemas.functions import Label
from registry.messages.node import Arrays, Compute, RequestUsage


async def run_compute(job: BilledRequest, work: Compute) -> Arrays:
    """Run one Compute of a request. Raises DispatchError."""
    arrays: Arrays | None = None
    async with job.run(work) as run:
        async for event in run:
            match event:
                case Assigned():
                    job.note_assigned(event)
                case Arrays():
                    arrays = event
                case RequestUsage():
                    break
    if arrays is None:
        raise DispatchError("internal", "the node ended the call without a result", status=500)
    return arrays


Vector: TypeAlias = "array.array[float]"


def rows(arrays: Arrays, name: str) -> list[Vector]:
    """Return a float32 array [n, width] as n vectors."""
    found = arrays.arrays.get(name)
    if found is None or found.dtype != "float32" or len(found.shape) != 2:
        raise DispatchError("internal", f"the node sent no float32 matrix {name!r}", status=500)
    count, width = found.shape
    if len(found.data) != count * width * 4:
        raise DispatchError("internal", f"the node's {name!r} has the wrong number of bytes", status=500)
    whole = memoryview(found.data)
    vectors = []
    for index in range(count):
        vector = array.array("f")
        vector.frombytes(whole[index * width * 4 : (index + 1) * width * 4])
        vectors.append(vector)
    return vectors


def shortened(vector: Vector, dimensions: int) -> Vector:
    """Return the first `dimensions`, scaled to unit length."""
    head = vector[:dimensions]
    norm = math.sqrt(sum(value * value for value in head)) or 1.0
    return array.array("f", [value / norm for value in head])


def as_json(vector: Vector, *, base64_encoded: bool) -> str | list[float]:
    """Return a vector in the form of the embeddings endpoint."""
    return base64.b64encode(vector.tobytes()).decode("ascii") if base64_encoded else vector.tolist()


def top_labels(logits: Vector, labels: Sequence[str], top_k: int) -> list[Label]:
    """Return the `top_k` labels of the highest logits, with softmax scores over all labels."""
    values = logits.tolist()
    peak = max(values, default=0.0)
    weights = [math.exp(value - peak) for value in values]
    total = sum(weights) or 1.0
    best = sorted(range(len(values)), key=lambda index: -values[index])[:top_k]
    return [
        Label(label=labels[i] if i < len(labels) else f"LABEL_{i}", score=weights[i] / total, logit=values[i])
        for i in best
    ]
