import pytest
import torch
from torch import Tensor, nn

from nas.model.decoder import Decoder, build
from nas.model.layers import FeedForward
from nas.recipe.candidate import Candidate, candidate_id
from nas.recipe.recipe import Foldable, Normalisation, Recipe
from nas.training.distillation.foldable import floor_singular_values, keep_foldable
from nas.training.trainer import TrainingRun
from tests.nas.training import short_runs

FLOOR = 0.3
SETTINGS = Foldable(floor=FLOOR, every=5)


def candidate(name: str = "SM+ScFFN", foldable: Foldable | None = SETTINGS) -> Candidate:
    return short_runs.candidate(name, foldable=foldable)


def ffn_of(layer: nn.Module) -> FeedForward:
    assert isinstance(layer.ffn, FeedForward)
    return layer.ffn


@torch.no_grad()
def model_of(name: str, *, smallest: float = 0.01) -> Decoder:
    """The singular values of every linear FFN's M are evenly spread from `smallest` to 2."""
    generator = torch.Generator().manual_seed(0)
    model = build(candidate(name).trained, generator)
    for layer in model.layers:
        ffn, size = ffn_of(layer), model.architecture.d_model
        left, _, right = torch.linalg.svd(torch.randn(size, size, generator=generator))
        product = (left * torch.linspace(2, smallest, size)) @ right
        if ffn.residual is None:
            product -= torch.eye(size)
        else:
            ffn.residual.alpha.fill_(-0.7)
            ffn.residual.beta.fill_(0.8)
            product = -0.7 * (product - 0.8 * torch.eye(size))
        if ffn.fused is None:
            ffn.down.weight.copy_(product @ torch.linalg.pinv(ffn.up.weight))
        else:
            ffn.fused.weight.copy_(product)
    return model


def stream_map(ffn: FeedForward) -> Tensor:
    """M, from what the FFN does to the rows of 1, without biases."""
    identity = torch.eye((ffn.up if ffn.fused is None else ffn.fused).in_features)
    zero = torch.zeros_like(identity)
    return (ffn(identity, identity) - ffn(zero, zero)).T.detach().double()


def smallest(ffn: FeedForward) -> float:
    return float(torch.linalg.svdvals(stream_map(ffn))[-1])


@pytest.mark.parametrize("name", ["SM+ScFuFFN", "SM+ScFFN", "SM", "2xoSoFo"])
def test_singular_values_below_the_floor_are_raised_to_it_and_nothing_else_moves(name):
    for layer in model_of(name).layers:
        before = stream_map(ffn_of(layer))
        left, sizes, right = torch.linalg.svd(before)
        assert 0 < (sizes < FLOOR).sum() < len(sizes)
        floor_singular_values(ffn_of(layer), FLOOR)
        expected = (left * sizes.clamp(min=FLOOR)) @ right
        torch.testing.assert_close(stream_map(ffn_of(layer)), expected, rtol=0, atol=1e-4 * float(sizes[0]))
        assert smallest(ffn_of(layer)) == pytest.approx(FLOOR, rel=1e-3)


def test_of_two_linears_down_changes_the_least():
    ffn = ffn_of(model_of("SM+ScFFN").layers[0])
    down, up = (linear.weight.detach().clone().double() for linear in (ffn.down, ffn.up))
    floor_singular_values(ffn, FLOOR)
    moved = ffn.down.weight.detach().double() - down
    least = moved @ up @ torch.linalg.pinv(up)  # of all matrices with the same product
    assert torch.equal(ffn.up.weight.double(), up)
    torch.testing.assert_close(moved, least, rtol=0, atol=1e-4 * float(moved.abs().max()))


def test_what_is_within_the_floor_is_left_bit_for_bit():
    model = model_of("SM+ScFFN", smallest=FLOOR + 0.01)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keep_foldable(model, SETTINGS, step=16, num_steps=16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_layer_is_left_for_the_divergence_rule(broken):
    ffn = ffn_of(model_of("SM+ScFuFFN").layers[0])
    with torch.no_grad():
        ffn.fused.weight[0, 0] = broken
    before = ffn.fused.weight.detach().clone()
    floor_singular_values(ffn, FLOOR)
    assert torch.equal(ffn.fused.weight.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("name", "floored"),
    [
        ("1xLSLGo-1xoSoFs-o", [1]),  # behind the last live norm of a net without a final one
        ("1xoSoFs-1xLSLGo", [0]),  # ahead of the first
        ("1xLSLFs-1xLSLFs", []),  # between live norms
        ("1xoSlFs-1xoSoFs-o", [1]),  # a frozen norm before the FFN
        ("SM+R", []),
    ],
)
def test_only_ffns_that_fold_away_are_floored(name, floored):
    model = model_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    keep_foldable(model, SETTINGS, step=5, num_steps=16)
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {f"layers.{index}.ffn.fused.weight" for index in floored}


def test_a_run_raises_them_every_so_many_steps_and_at_the_end(corpus):
    run, plain = (
        TrainingRun(made, corpus, seed=0, folder=None, device="cpu", initial={})
        for made in (candidate(), candidate(foldable=None))
    )
    with torch.no_grad():
        for layers in (run.objective.model.layers, plain.objective.model.layers):
            for layer in layers:
                ffn_of(layer).residual.beta.zero_()  # of a map that is far from 1
    for step in range(1, 17):
        run.step()
        plain.step()
        if step < 5:
            assert all(map(torch.equal, run.objective.state_dict().values(), plain.objective.state_dict().values()))
        if step in (5, 10, 15, 16):
            assert min(smallest(ffn_of(layer)) for layer in run.objective.model.layers) >= FLOOR * 0.999


def test_a_floor_names_a_candidate_where_there_is_an_ffn_and_must_be_possible():
    assert candidate_id(candidate()) != candidate_id(candidate(foldable=None))
    assert candidate_id(candidate()) != candidate_id(candidate(foldable=Foldable(floor=0.4, every=5)))
    assert candidate_id(candidate("SM+LN+G")) == candidate_id(candidate("SM+LN+G", foldable=None))
    for numbers in ({"floor": 0.0}, {"floor": 1.1}, {"floor": float("nan")}, {"every": 0}):
        with pytest.raises(ValueError, match="`floor` of foldable FFNs must be above 0 and at most 1, and `every`"):
            Foldable(**numbers)
    Recipe(foldable=Foldable(), normalisation=Normalisation(kind="weight", linears="qk"))
    with pytest.raises(ValueError, match=r"kept foldable or trained with normalised weights, not both.*'qk\+ffn'"):
        Recipe(foldable=Foldable(), normalisation=Normalisation(kind="weight", linears="qk+ffn"))
