import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from costmodel import ops
from costmodel.execution.op_functions import evaluate, numpy_library
from costmodel.ops import SoftmaxForm
from nas.attention.causal import row_bounds
from nas.model.decoder import Decoder, build
from nas.model.mpc_friendly import FORMS, PiecewiseGelu, normalised_attention
from nas.model.norms import MEMORY, FrozenNorm, followed_deviations, frozen_norms, norm_of
from nas.model.weights import deployed_weights, load_deployed, load_stored, stored_weights
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.forms import Norm
from search_spaces.notation import parse
from tests.small_models import GPT2

Drawn = TypeVar("Drawn", bound=nn.Module)
FROZEN: dict[Norm, Norm] = {"layernorm": "frozen-layernorm", "rmsnorm": "frozen-rmsnorm"}
EIGHT_WIDE, EPSILON = base_architecture("tiny", Dimensions(d_model=8)), 1e-5
STREAM = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))


def drawn(module: Drawn) -> Drawn:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def decoder(name: str = "SM+fLN+R") -> Decoder:
    return drawn(build(parse(name, GPT2).architecture, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_until_it_is_frozen_it_is_the_norm_it_stands_for(kind):
    frozen, live = (drawn(norm_of(norm, EIGHT_WIDE)) for norm in (FROZEN[kind], kind))
    torch.testing.assert_close(frozen(STREAM), live(STREAM))


@pytest.mark.parametrize("centred", [True, False])
def test_once_frozen_it_divides_every_position_by_the_running_mean(centred):
    norm = drawn(FrozenNorm(8, EPSILON, centred=centred))
    norm(STREAM)
    norm.follow()
    norm.set_frozen()
    from_centre = STREAM - STREAM.mean(dim=-1, keepdim=True) if centred else STREAM
    sigma = from_centre[:, 1:].square().mean(dim=-1).sqrt().mean()  # position 0 does not count
    bias = norm.bias if centred else 0.0
    torch.testing.assert_close(norm(STREAM), norm.weight * from_centre / sigma + bias)
    norm(7 * STREAM)
    norm.follow()
    torch.testing.assert_close(norm.deviation, sigma)  # constant from now on


def test_the_running_mean_forgets_and_a_validation_moves_nothing():
    norm = FrozenNorm(8, EPSILON, centred=True)
    norm(STREAM)
    norm.follow()
    first = norm.deviation
    with torch.no_grad():
        norm(5 * STREAM)
    norm.follow()
    assert torch.equal(norm.deviation, first)
    for part in (4 * STREAM, 6 * STREAM):  # two passes of one step
        norm(part)
    norm.follow()
    torch.testing.assert_close(norm.deviation, MEMORY * first + (1 - MEMORY) * 5 * first)


def test_a_single_position_is_seen_too():
    norm = FrozenNorm(8, EPSILON, centred=True)
    norm(STREAM[:, :1])
    norm.follow()
    assert norm.deviation != 1


def frozen_decoder() -> Decoder:
    model = decoder()
    model(TOKENS)
    followed_deviations(model)
    for norm in frozen_norms(model).values():
        norm.set_frozen()
    return model


def test_norms_are_listed_in_order_of_execution():
    assert list(frozen_norms(decoder("1xlSLRo-1xlSmRo-l"))) == [
        "layers.0.norm1",
        "layers.1.norm1",
        "layers.1.norm2",
        "final_norm",
    ]


def test_deployed_gains_have_taken_up_the_constant_and_load_back():
    model = frozen_decoder()
    weights = deployed_weights(model)
    norm = model.layers[0].norm1
    assert isinstance(norm, FrozenNorm)
    torch.testing.assert_close(weights["layers.0.norm1.weight"], norm.weight / norm.sigma)
    assert not [name for name in weights if name.endswith(("sigma", "frozen"))]
    again = decoder()
    load_deployed(again, weights)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    for name, value in deployed_weights(again).items():
        assert torch.equal(value, weights[name]), name


def test_a_gain_can_be_loaded_without_freezing():
    source, model = decoder("SM+LN+R"), decoder()
    live = {f"{name}.frozen": torch.zeros(()) for name in frozen_norms(model)}
    load_deployed(model, deployed_weights(source) | live)
    torch.testing.assert_close(model(TOKENS).logits, source(TOKENS).logits)


def test_files_keep_the_state():
    model = frozen_decoder()
    model.layers[1].norm2.set_frozen(False)
    again = decoder()
    load_stored(again, {name: value.clone() for name, value in stored_weights(model).items()})
    states: list[list[bool]] = [[norm.is_frozen for norm in frozen_norms(net).values()] for net in (model, again)]
    assert states[0] == states[1] == [True, True, True, False, True]
    logits: list[Tensor] = [net(TOKENS).logits for net in (model, again)]
    assert torch.equal(*logits)


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
def test_output_and_entropy_are_those_written_out(form):
    queries, keys, values = heads()
    output, entropy = normalised_attention(queries, keys, values, form=form)
    for row in range(7):
        scores = [float(queries[1, 2, row] @ keys[1, 2, column]) / 2 for column in range(row + 1)]  # sqrt(4) = 2
        positive = [WRITTEN_OUT[form](score) for score in scores]
        weights = [value / (sum(positive) + (2**-10 if form == "relu" else 0.0)) for value in positive]
        expected = sum(weight * values[1, 2, column] for column, weight in enumerate(weights))
        torch.testing.assert_close(output[1, 2, row], torch.as_tensor(expected, dtype=torch.float64).expand(4))
        shares = [value / sum(positive) for value in positive if value > 0]
        assert float(entropy[1, 2, row]) == pytest.approx(-sum(share * math.log(share) for share in shares), abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_entropy_is_between_0_and_that_of_a_uniform_row(form):
    entropy = normalised_attention(*heads(length=50), form=form).entropy
    assert (entropy >= 0).all()
    assert (entropy <= row_bounds(50)).all()
    uniform = normalised_attention(*(torch.ones(1, 1, 50, 4, dtype=torch.float64),) * 3, form=form)
    torch.testing.assert_close(uniform.entropy[0, 0], row_bounds(50))


@pytest.mark.parametrize("form", FORMS)
def test_output_and_entropy_have_the_right_gradients(form):
    inputs = tuple(operand[:1, :1].clone().requires_grad_() for operand in heads(length=5))
    assert torch.autograd.gradcheck(lambda *operands: tuple(normalised_attention(*operands, form=form)), inputs)


def test_a_row_without_a_positive_score_attends_to_nothing():
    queries = torch.ones(1, 1, 3, 4).requires_grad_()
    output, entropy = normalised_attention(queries, -torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), form="relu")
    (output.sum() + entropy.sum()).backward()
    assert output.abs().max() == entropy.abs().max() == 0
    assert queries.grad.isfinite().all()


def test_piecewise_gelu_is_the_op_graphs():
    source = np.linspace(-8, 8, 100_001)
    ours = PiecewiseGelu()(torch.from_numpy(source)).numpy()
    op = ops.Gelu(rows=1, features=len(source), form="piecewise")
    np.testing.assert_allclose(ours, evaluate(op, numpy_library(), {}, source[None])[0], atol=1e-9)


def test_piecewise_gelu_and_its_gradient_are_finite_far_out():
    source = torch.tensor([-1e30, -6.0, -3.0, 0.0, 2.0, 1e30], requires_grad=True)
    result = PiecewiseGelu()(source)
    result.sum().backward()
    assert result[[0, 5]].tolist() == [0.0, source[5].item()]
    assert source.grad[[0, 1, 5]].tolist() == [0.0, 0.0, 1.0]
    assert source.grad.isfinite().all()


def test_queries_of_0_cannot_start_a_relu_in_place_of_softmax():
    architecture = parse("HH(SM+G)", base_architecture("tiny", Dimensions(softmax="relu"))).architecture
    Decoder(architecture)  # trained weights can be loaded
    with pytest.raises(ValueError, match="block 'sas' starts from queries of 0, where softmax 'relu' has no gradient"):
        build(architecture, torch.Generator())
