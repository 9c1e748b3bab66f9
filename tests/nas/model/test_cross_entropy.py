"""Cross-entropy in chunks against torch's over all logits, values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nas.model import cross_entropy
from nas.model.cross_entropy import projected_cross_entropy

ROWS, WIDTH, VOCAB = 10, 6, 7


@pytest.fixture(params=[1, 3 * VOCAB, 5 * VOCAB + 2], ids=["a row", "uneven chunks", "halves"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_SIZE, "cpu", request.param)
    monkeypatch.setattr(cross_entropy, "LEAST_ROWS", 1)


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (ROWS,), generator=generator)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_give_the_loss_and_gradients_of_all_logits(dtype: torch.dtype) -> None:
    results = []
    for way in (lambda h, w, t: functional.cross_entropy(h @ w.T, t), projected_cross_entropy):
        hidden, weight, targets = drawn(dtype)
        loss = way(hidden, weight, targets)
        (3 * loss).backward()
        results.append((loss, hidden.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("chunked")
def test_gradients_by_differences() -> None:
    hidden, weight, targets = drawn(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: projected_cross_entropy(h, w, targets), (hidden, weight))


@pytest.mark.usefixtures("chunked")
def test_under_autocast_products_are_lowered_and_sums_are_not() -> None:
    hidden, weight, targets = drawn(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = projected_cross_entropy(hidden, weight, targets)
    loss.backward()
    exact = functional.cross_entropy(hidden @ weight.T, targets)
    assert loss.dtype == weight.grad.dtype == torch.float32
    assert loss != exact
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("chunked")
def test_without_gradients_a_loss_is_all() -> None:
    hidden, weight, targets = drawn(torch.float32)
    with torch.no_grad():
        assert not projected_cross_entropy(hidden, weight, targets).requires_grad
