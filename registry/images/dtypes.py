"""Element types: the dominant one of a model, and the conversion of elements."""

from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np

from registry.images.dtype_names import BY_NAME

FLOATS: Mapping[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def dominant_dtype(sizes: Iterable[tuple[str, int]]) -> str:
    """Return the float dtype (`float32`, …) of most bytes of (dtype, bytes) pairs; float32 if none."""
    totals: dict[str, int] = {}
    for dtype, nbytes in sizes:
        if dtype in FLOATS:
            totals[dtype] = totals.get(dtype, 0) + nbytes
    dominant = max(totals, key=lambda dtype: totals[dtype], default="F32")
    return next(name for name, dtype in BY_NAME.items() if dtype == dominant)


def convert(raw: memoryview, stored: str, wanted: str) -> memoryview:
    """Return the elements of `raw` in another float dtype, as bytes; rounds to nearest, ties to even."""
    # Out-of-range values become infinities, as in torch; that is no reason to warn.
    with np.errstate(all="ignore"):
        converted = np.frombuffer(raw, dtype=FLOATS[stored]).astype(FLOATS[wanted])
    return converted.view(np.uint8).data
