import pytest
import torch
from torch import Tensor, nn

from nas.recipe.recipe import Normalisation
from nas.training.muon import Muon, orthogonalised
from nas.training.objective import Objective
from nas.training.optimizer import optimizers
from tests.nas.training.short_runs import candidate


def plain_iteration(matrix: Tensor) -> Tensor:
    """Newton-Schulz on the matrix itself, as its authors print it."""
    result = matrix / matrix.norm()
    for _ in range(5):
        gram = result @ result.T
        result = 3.4445 * result + (-4.7750 * gram + 2.0315 * gram @ gram) @ result
    return result


@pytest.mark.parametrize("shape", [(4, 4), (4, 9), (1, 3)])
def test_iterating_on_the_gram_matrix_is_iterating_on_the_matrix(shape):
    drawn = torch.randn((3, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.stack([plain_iteration(matrix) for matrix in drawn])
    torch.testing.assert_close(orthogonalised(drawn), expected, rtol=1e-9, atol=1e-9)


def test_two_steps_are_the_formula():
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 3, generator=generator, dtype=torch.float64))
    expected, momentum = weight.detach().clone(), torch.zeros(6, 3, dtype=torch.float64)
    optimizer = Muon([(weight, 1)], lr=0.1, weight_decay=0.5)
    for _ in range(2):
        gradient = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        ahead = 0.05 * gradient + 0.95 * momentum
        step = 0.2 * 6**0.5 * plain_iteration(ahead.T).T
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * step
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-9)


def test_packed_matrices_move_as_if_each_were_a_weight():
    generator = torch.Generator().manual_seed(0)
    packed = nn.Parameter(torch.randn(12, 4, generator=generator))
    parts = [nn.Parameter(part.clone()) for part in packed.detach().split(4)]
    packed.grad = torch.randn(12, 4, generator=generator)
    for part, gradient in zip(parts, packed.grad.split(4), strict=True):
        part.grad = gradient.clone()
    Muon([(packed, 3)], lr=0.1, weight_decay=0.1).step()
    Muon([(part, 1) for part in parts], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(packed.detach(), torch.cat([part.detach() for part in parts]))


def test_what_has_no_gradient_and_a_matrix_of_zeros_stay():
    assert orthogonalised(torch.zeros(1, 2, 3)).equal(torch.zeros(1, 2, 3))
    weight = nn.Parameter(torch.ones(2, 2))
    Muon([(weight, 1)], lr=0.1, weight_decay=0.1).step()
    assert weight.equal(torch.ones(2, 2))


def test_the_weights_of_the_layers_linears_are_muons_and_all_else_adamws():
    made = candidate("1xLTLKs-1xoSoFs", optimizer="muon")
    objective = Objective(made, torch.Generator().manual_seed(0))
    names = {parameter: name for name, parameter in objective.named_parameters()}
    rest, muon = [
        {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in optimizers(objective, made.recipe)
    ]
    attention = {f"model.layers.{layer}.attention.{name}.weight" for layer in (0, 1) for name in ("qkv", "out")}
    ffns = {"model.layers.0.ffn.up.weight", "model.layers.0.ffn.down.weight", "model.layers.1.ffn.fused.weight"}
    assert muon == attention | ffns
    assert rest == set(names.values()) - muon


@pytest.mark.parametrize("normalisation", [None, Normalisation(kind="weight", linears="qkv+ffn")])
def test_queries_keys_and_values_are_three_matrices(normalisation):
    made = candidate("SM+LN+G", optimizer="muon", normalisation=normalisation)
    objective = Objective(made, torch.Generator().manual_seed(0))
    _, muon = optimizers(objective, made.recipe)
    packed = {parameter: group["packed"] for group in muon.param_groups for parameter in group["params"]}
    named = [(name, packed[parameter]) for name, parameter in objective.named_parameters() if parameter in packed]
    assert len(named) == 8
    assert all(count == (3 if ".qkv." in name else 1) for name, count in named)
