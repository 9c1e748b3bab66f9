from itertools import product

import pytest
import torch

from nas.model import bf16_products
from nas.model.bf16_products import add_product, wide_product

LAYOUTS = {
    "rows": lambda matrix: matrix,
    "transposed": lambda matrix: matrix.T.contiguous().T,
    "of a larger one": lambda matrix: torch.nn.functional.pad(matrix, (3, 2, 1, 1))[1:-1, 3:-2],
    "neither": lambda matrix: torch.stack((matrix, matrix), dim=2)[..., 0],
    "one row for all": lambda matrix: matrix[:1].expand_as(matrix),
}


@pytest.mark.parametrize("has_mkl", [True, False])
@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 4, 1), (1, 1, 6), (64, 300, 33)])
def test_products_of_bf16_have_sums_and_results_in_fp32(monkeypatch, shape, has_mkl):
    assert not has_mkl or bf16_products._mkl() is not None or not torch.backends.mkl.is_available()
    if not has_mkl:
        monkeypatch.setattr(bf16_products, "_mkl", lambda: None)
    rows, depth, columns = shape
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, depth, generator=generator).bfloat16()
    right = torch.randn(depth, columns, generator=generator).bfloat16()
    before = torch.randn(rows, columns, generator=generator)
    for laid_left, laid_right in product(LAYOUTS.values(), LAYOUTS.values()):
        a, b, total = laid_left(left), laid_right(right), before.clone()
        exact = a.double() @ b.double()
        add_product(total, a, b)
        got = wide_product(a, b)
        assert got.dtype == total.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(total.double(), before + exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_products_stay_in_their_type(dtype):
    left, right, total = (torch.randn(4, 4, dtype=dtype) for _ in range(3))
    assert wide_product(left, right).equal(left @ right)
    expected = torch.addmm(total, left, right)
    add_product(total, left, right)
    assert total.equal(expected)


def test_weights_are_rounded_once_after_each_change():
    linear, source = torch.nn.Linear(5, 3), torch.randn(4, 5)
    with bf16_products.bf16_products("cpu"):
        first = linear(source)
        copy = bf16_products.rounded(linear.weight)
        assert bf16_products.rounded(linear.weight).data_ptr() == copy.data_ptr()
        first.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.nn.functional.linear(source, linear.weight, linear.bias)
        gradient = torch.autograd.grad(expected.sum(), linear.weight)[0]
    assert first.equal(expected)
    assert linear.weight.grad.dtype == torch.float32
    assert linear.weight.grad.equal(gradient)
    with torch.no_grad():
        linear.weight.mul_(3.0)
    assert bf16_products.rounded(linear.weight).equal(linear.weight.bfloat16())
    linear.weight.data = torch.ones(3, 5)
    assert bf16_products.rounded(linear.weight).equal(torch.ones(3, 5).bfloat16())
    assert linear(source).dtype == torch.float32  # outside, products are not lowered


def test_logits_are_not_rounded():
    source, weight = torch.randn(2, 3, 8), torch.nn.Parameter(torch.randn(11, 8))
    exact = source.bfloat16().double() @ weight.detach().bfloat16().double().T
    with torch.no_grad():
        logits = bf16_products.wide_linear(source, weight)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
