"""bfloat16 in the interpreter: conversions equal torch's, products equal those of the widened operands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernel_checks.toy_kernels import half_arithmetic_kernel

from dev.kernel_checks.bfloat16 import narrow, widen

pytestmark = pytest.mark.interpreter


def test_narrow_rounds_as_torch_does():
    bits = torch.randint(-(2**31), 2**31, (4096,)).to(torch.int32)
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40, 1.00390625, 1.01171875]
    )
    values = torch.cat([bits.view(torch.float32), special])
    got = torch.from_numpy(narrow(values.numpy()).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(got, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    back = torch.from_numpy(widen(got.view(torch.int16).numpy().view(np.uint16)))
    torch.testing.assert_close(back, got.float(), rtol=0, atol=0, equal_nan=True)


def test_sums_comparisons_and_products_of_bfloat16_blocks():
    x, y = torch.randn(2, 16, 16).bfloat16()
    total, product, less = torch.empty_like(x), torch.empty(16, 16), torch.empty(16, 16, dtype=torch.int8)
    half_arithmetic_kernel[(1,)](x, y, total, product, less, SIZE=16)
    assert torch.equal(total, x + y) and torch.equal(less.bool(), x < y)
    torch.testing.assert_close(product.double(), x.double() @ y.double(), rtol=1e-5, atol=1e-5)
