"""Linears by oneDNN differ from others by rounding, and only those in float32 are computed by it."""

import pytest
import torch

from nas.model.onednn import onednn_linears

HAS_AVX512 = torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_supported()


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of the sources that oneDNN was given."""
    shapes, product = [], torch.ops.mkldnn._linear_pointwise

    def counted(source, *rest):
        shapes.append(tuple(source.shape))
        return product(source, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    return shapes


@pytest.mark.parametrize("has_bias", [True, False])
def test_linears_by_onednn_differ_by_rounding(shapes, has_bias):
    torch.manual_seed(0)
    source, linear = torch.randn(2, 40, 48), torch.nn.Linear(48, 56, bias=has_bias)
    wanted = linear.double()(source.double()).detach()
    linear.float()
    with onednn_linears():
        torch.testing.assert_close(linear(source).double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(linear(source[:, ::7]).double(), wanted[:, ::7], rtol=1e-5, atol=1e-5)
        assert not linear(source).requires_grad
    assert shapes == ([(2, 40, 48), (2, 6, 48), (2, 40, 48)] if HAS_AVX512 else [])


def test_other_linears_are_computed_as_usual(shapes):
    source, linear = torch.randn(40, 48), torch.nn.Linear(48, 56)
    with onednn_linears():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(source).dtype == torch.bfloat16
        assert linear.double()(source.double()).dtype == torch.float64
    assert shapes == []
