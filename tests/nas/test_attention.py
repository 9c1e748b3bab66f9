"""Attention and its entropy against textbook formulas in float64, with gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nas.attention import attention_reference, causal_attention, row_bounds


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(*shape, generator=generator, dtype=dtype)).requires_grad_() for _ in range(3)]


def naive(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[list, list]:
    """One head, row by row, in plain Python."""
    outputs, entropies = [], []
    for i in range(len(queries)):
        scores = [math.exp(float(queries[i] @ keys[j]) / math.sqrt(queries.shape[1])) for j in range(i + 1)]
        weights = [score / sum(scores) for score in scores]
        outputs.append(sum(weight * values[j] for j, weight in enumerate(weights)))
        entropies.append(-sum(weight * math.log(weight) for weight in weights))
    return outputs, entropies


@pytest.mark.parametrize("attend", [causal_attention, attention_reference])
def test_output_and_entropy_are_the_textbooks(attend) -> None:
    queries, keys, values = heads(1, 1, 6, 3)
    outputs, entropies = naive(*(part[0, 0].detach() for part in (queries, keys, values)))
    attended = attend(queries, keys, values)
    torch.testing.assert_close(attended.output[0, 0], torch.stack(outputs))
    torch.testing.assert_close(attended.entropy[0, 0], torch.tensor(entropies, dtype=torch.float64))


@pytest.mark.parametrize("head_dim", [1, 4, 8, 20, 64])
def test_fast_path_equals_the_reference_in_values_and_gradients(head_dim: int) -> None:
    parts = heads(2, 3, 17, head_dim)
    weights = heads(2, 3, 17, head_dim, seed=1)[0].detach()
    results = []
    for attend in (causal_attention, attention_reference):
        output, entropy = attend(*parts)
        total = (output * weights).sum() + (entropy * weights[..., 0]).sum()
        results.append((output, entropy, *torch.autograd.grad(total, parts)))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(lambda *parts: tuple(causal_attention(*parts)), heads(1, 2, 5, 3))


@given(st.integers(1, 40), st.sampled_from([0.0, 0.1, 1.0, 30.0, 1e4]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_entropy_of_row_i_lies_between_0_and_ln_i(length: int, scale: float, seed: int) -> None:
    entropy = causal_attention(*heads(1, 2, length, 8, seed=seed, dtype=torch.float32, scale=scale)).entropy
    assert bool((entropy >= 0).all())
    assert bool((entropy <= row_bounds(length).float()).all())


def test_uniform_heads_reach_the_bound_and_sharp_ones_zero() -> None:
    zeros = torch.zeros(1, 1, 128, 8)
    uniform = causal_attention(zeros, zeros, zeros).entropy.mean().item()
    assert uniform == pytest.approx(math.lgamma(129) / 128, abs=1e-5)  # ln(128!) / 128 = 3.878
    keys = 1e4 * torch.eye(8).reshape(1, 1, 8, 8)
    assert causal_attention(keys, keys, keys).entropy.abs().max().item() < 1e-3


def test_gradient_stays_finite_where_weights_vanish() -> None:
    parts = heads(1, 2, 32, 8, dtype=torch.float32, scale=100.0)
    for attend in (causal_attention, attention_reference):
        gradients = torch.autograd.grad(attend(*parts).entropy.sum(), parts[:2])
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_low_precision_values_keep_their_type_and_the_entropy_is_fp32() -> None:
    parts = [part.detach().bfloat16() for part in heads(1, 2, 16, 8)]
    output, entropy = causal_attention(*parts)
    assert output.dtype == torch.bfloat16
    assert entropy.dtype == torch.float32
