"""Matrix products with weights, in the form that is fastest for their size."""

from functools import cache

import torch
import torch.nn.functional as F

# In float32 on a CPU, `weight @ x.T` beats `x @ weight.T` by up to a half for this many rows; with fewer
# the latter runs at the memory's speed, and with more the two are alike.
_COLUMN_ROWS = range(4, 33)


def by_columns(x: torch.Tensor) -> bool:
    """Return whether `[rows, …]` is best stored column-major: see `as_columns`."""
    return x.shape[0] in _COLUMN_ROWS and x.dtype == torch.float32 and x.device.type == "cpu"


def as_columns(x: torch.Tensor) -> torch.Tensor:
    """Return the same `[rows, width]`, stored as `[width, rows]`."""
    return x.t().contiguous().t()


def is_bfloat16_row(x: torch.Tensor) -> bool:
    """Return whether `[rows, …]` is one row that a matrix-vector product takes.

    In bfloat16 on a CPU with instructions for it, `F.linear` takes up to twice as long for one row.
    """
    one = x.shape[0] == 1 and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return one and _has_bfloat16_products()


@cache
def _has_bfloat16_products() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` for `[rows, width]`; stored column-major where `by_columns(x)`."""
    if is_bfloat16_row(x):
        out = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return out[None]
    if not by_columns(x):
        return F.linear(x, weight, bias)
    out = (weight @ x.t()).t()
    return out if bias is None else out.add_(bias)
