"""Names of element types, in requests and in the image."""

from collections.abc import Mapping

from registry.errors import CheckpointError

BY_NAME: Mapping[str, str] = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
REQUESTS = ("auto", "float32", "bfloat16", "float16")


def target_dtype(stored: str, requested: str) -> str:
    """Return the dtype of a tensor in the image; only floats are converted."""
    if requested not in REQUESTS:
        raise CheckpointError(f"unknown dtype {requested!r}: use one of {', '.join(REQUESTS)}")
    return stored if requested == "auto" or stored not in BY_NAME.values() else BY_NAME[requested]
