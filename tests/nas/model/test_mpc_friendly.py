import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from costmodel import ops
from costmodel.execution.op_functions import evaluate, numpy_library
from costmodel.ops import SoftmaxForm
from nas.attention.causal import row_bounds
from nas.model.decoder import Decoder, build
from nas.model.mpc_friendly import FORMS, PiecewiseGelu, normalised_attention
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.notation import parse

WRITTEN_OUT: dict[SoftmaxForm, Callable[[float], float]] = {
    "2quad": lambda score: (score + 5) ** 2,
    "power8": lambda score: score**8,
    "relu": lambda score: max(score, 0.0),
}


def heads(length: int = 7, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values: 2 x 3 x length x 4, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(2, 3, length, 4, generator=generator, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("form", FORMS)
def test_output_and_entropy_are_those_written_out(form: SoftmaxForm) -> None:
    queries, keys, values = heads()
    output, entropy = normalised_attention(queries, keys, values, form=form)
    assert entropy is not None
    for row in range(7):
        scores = [float(queries[1, 2, row] @ keys[1, 2, column]) / 2 for column in range(row + 1)]  # sqrt(4) = 2
        positive = [WRITTEN_OUT[form](score) for score in scores]
        weights = [value / (sum(positive) + (2**-10 if form == "relu" else 0.0)) for value in positive]
        expected = sum(weight * values[1, 2, column] for column, weight in enumerate(weights))
        torch.testing.assert_close(output[1, 2, row], torch.as_tensor(expected, dtype=torch.float64).expand(4))
        shares = [value / sum(positive) for value in positive if value > 0]
        assert float(entropy[1, 2, row]) == pytest.approx(-sum(share * math.log(share) for share in shares), abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_entropy_is_between_0_and_that_of_a_uniform_row(form: SoftmaxForm) -> None:
    entropy = normalised_attention(*heads(length=50), form=form).entropy
    assert (entropy >= 0).all()
    assert (entropy <= row_bounds(50)).all()
    uniform = normalised_attention(*(torch.ones(1, 1, 50, 4, dtype=torch.float64),) * 3, form=form)
    assert uniform.entropy is not None
    torch.testing.assert_close(uniform.entropy[0, 0], row_bounds(50))


@pytest.mark.parametrize("form", FORMS)
def test_output_and_entropy_have_the_right_gradients(form: SoftmaxForm) -> None:
    inputs = tuple(operand[:1, :1].clone().requires_grad_() for operand in heads(length=5))
    assert torch.autograd.gradcheck(lambda *operands: tuple(normalised_attention(*operands, form=form)), inputs)


def test_a_row_without_a_positive_score_attends_to_nothing() -> None:
    queries = torch.ones(1, 1, 3, 4).requires_grad_()
    output, entropy = normalised_attention(queries, -torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), form="relu")
    (output.sum() + entropy.sum()).backward()
    assert output.abs().max() == entropy.abs().max() == 0
    assert queries.grad.isfinite().all()


def test_piecewise_gelu_is_the_op_graphs() -> None:
    source = np.linspace(-8, 8, 100_001)
    ours = PiecewiseGelu()(torch.from_numpy(source)).numpy()
    op = ops.Gelu(rows=1, features=len(source), form="piecewise")
    np.testing.assert_allclose(ours, evaluate(op, numpy_library(), {}, source[None])[0], atol=1e-9)


def test_piecewise_gelu_and_its_gradient_are_finite_far_out() -> None:
    source = torch.tensor([-1e30, -6.0, -3.0, 0.0, 2.0, 1e30], requires_grad=True)
    result = PiecewiseGelu()(source)
    result.sum().backward()
    assert result[[0, 5]].tolist() == [0.0, source[5].item()]
    assert source.grad is not None
    assert source.grad[[0, 1, 5]].tolist() == [0.0, 0.0, 1.0]
    assert source.grad.isfinite().all()


def test_queries_of_0_cannot_start_a_relu_in_place_of_softmax() -> None:
    architecture = parse("HH(SM+G)", base_architecture("tiny", Dimensions(softmax="relu"))).architecture
    Decoder(architecture)  # trained weights can be loaded
    with pytest.raises(ValueError, match="block 'sas' starts from queries of 0, where softmax 'relu' has no gradient"):
        build(architecture, torch.Generator())
