"""Products with weights: each form gives the same as plain arithmetic."""

import pytest
import torch

from invoker.engine.projection import project


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 4, 32, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_projection_is_a_product_with_a_bias(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    made = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, 96, generator=made).to(dtype) for size in (rows, 64))
    bias = torch.randn(64, generator=made).to(dtype) if with_bias else None
    kept = None if bias is None else bias.clone()
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    found = project(x, weight, bias)
    assert found.shape == (rows, 64) and found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-4 * 96)
    assert bias is None or torch.equal(bias, kept)  # type: ignore[arg-type]
