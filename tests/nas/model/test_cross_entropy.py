"""Cross-entropy in chunks against torch's over all logits, values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nas.model import cross_entropy
from nas.model.cross_entropy import capped, distilled, projected_cross_entropy

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
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_give_the_loss_and_gradients_of_all_logits(dtype: torch.dtype, cap: float | None) -> None:
    results = []
    for way in (lambda h, w, t, c: functional.cross_entropy(capped(h @ w.T, c), t), projected_cross_entropy):
        hidden, weight, targets = drawn(dtype)
        loss = way(hidden, weight, targets, cap)
        (3 * loss).backward()
        results.append((loss, hidden.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


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


def predicted(count: int) -> tuple[Tensor, Tensor]:
    drawn_logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kept = drawn_logits.log_softmax(1).topk(count)
    return kept.indices, kept.values


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [1, 3, VOCAB - 1])
def test_distillation_in_chunks_is_that_of_all_logits(monkeypatch, share: float, count: int) -> None:
    results = []
    for chunk_size in (1 << 20, 3 * VOCAB):
        monkeypatch.setitem(cross_entropy.CHUNK_SIZE, "cpu", chunk_size)
        monkeypatch.setattr(cross_entropy, "LEAST_ROWS", 1)
        hidden, weight, targets = drawn(torch.float64)
        losses = distilled(hidden, weight, targets, *predicted(count), share)
        (3 * losses.loss).backward()
        results.append((*losses, hidden.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, check_dtype=False)  # in one piece they are fp32


def test_a_table_that_is_not_trained_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_SIZE, "cpu", 1)
    hidden, weight, targets = drawn(torch.float32)
    projected_cross_entropy(hidden, weight.requires_grad_(False), targets).backward()
    assert weight.grad is None
    assert hidden.grad is not None
