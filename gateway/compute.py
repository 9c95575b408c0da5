"""Encoder calls: one forward each, and what their arrays mean."""

import array
import base64
import math
from collections.abc import Sequence

from gateway.contract import Assigned, DispatchError
from gateway.job import Job
from registry.messages import Array, Arrays, Compute, Usage


async def run_compute(job: Job, work: Compute) -> Arrays:
    """Carry out one Compute of a job."""
    arrays: Arrays | None = None
    async with job.run(work) as run:
        async for event in run:
            match event:
                case Assigned():
                    job.note_assigned(event)
                case Arrays():
                    arrays = event
                case Usage():
                    break
    if arrays is None:
        raise DispatchError("internal", "the node ended the call without a result", status=500)
    return arrays


def rows(arrays: Arrays, name: str) -> list[memoryview]:
    """A [n, width] float32 array as n views of float32."""
    found = arrays.arrays.get(name)
    if found is None or found.dtype != "float32" or len(found.shape) != 2:
        raise DispatchError("internal", f"the node sent no float32 matrix {name!r}", status=500)
    count, width = found.shape
    if len(found.data) != count * width * 4:
        raise DispatchError("internal", f"the node's {name!r} is not as long as it says", status=500)
    whole = memoryview(found.data)
    return [whole[i * width * 4 : (i + 1) * width * 4].cast("f") for i in range(count)]


def shortened(vector: memoryview, dimensions: int) -> memoryview:
    """The first dimensions, scaled to unit length again."""
    head = vector[:dimensions].tolist()
    norm = math.sqrt(sum(value * value for value in head)) or 1.0
    return memoryview(array.array("f", [value / norm for value in head]))


def as_json(vector: memoryview, *, base64_encoded: bool) -> str | list[float]:
    """A vector as the embeddings endpoint gives it."""
    if base64_encoded:
        return base64.b64encode(vector.tobytes()).decode("ascii")
    values: list[float] = vector.tolist()
    return values


def top_labels(logits: memoryview, labels: Sequence[str], top_k: int) -> list[tuple[str, float]]:
    """The likeliest labels and their softmax scores."""
    values: list[float] = logits.tolist()
    peak = max(values, default=0.0)
    weights = [math.exp(value - peak) for value in values]
    total = sum(weights) or 1.0
    best = sorted(range(len(values)), key=lambda index: -values[index])[:top_k]
    return [(labels[i] if i < len(labels) else f"LABEL_{i}", weights[i] / total) for i in best]


def pixels_from_nested(nested: object) -> Array:
    """A nested JSON array [3][height][width] of numbers as an Array [1, 3, height, width].

    Raises ValueError saying what is wrong.
    """
    planes = _sequence(nested, "the image")
    if len(planes) != 3:
        raise ValueError(f"the image has {len(planes)} planes, not 3")
    height = width = 0
    flat = array.array("f")
    for plane in planes:
        lines = _sequence(plane, "a plane")
        height = height or len(lines)
        if not lines or len(lines) != height:
            raise ValueError("the image's planes differ in height or are empty")
        for line in lines:
            values = _sequence(line, "a line")
            width = width or len(values)
            if not values or len(values) != width:
                raise ValueError("the image's lines differ in width or are empty")
            try:
                flat.extend(values)
            except (TypeError, OverflowError):
                raise ValueError("the image holds something other than numbers") from None
    return Array(dtype="float32", shape=(1, 3, height, width), data=flat.tobytes())


def _sequence(value: object, what: str) -> list[float]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    return value
