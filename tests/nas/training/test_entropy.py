import math
from typing import Any

import pytest
import torch

from nas.recipe.recipe import EntropyRegularisation, PenaltyForm
from nas.training.objective import EntropyPenalty, summarise

LARGEST = math.log(4)  # 1.3863 nats: the goldens have sequences of 4 tokens


def penalty(entropies: list, **settings) -> tuple[EntropyPenalty, torch.Tensor]:
    tensor = torch.tensor(entropies, dtype=torch.float64)
    layers, _, heads, _ = tensor.shape
    module = EntropyPenalty(EntropyRegularisation(**settings), num_layers=layers, num_heads=heads).double()
    return module, module(tensor)


def test_both_forms_by_hand():
    # One layer, one sequence, two heads. Head 0: mean (0 + 0.2 + 0.6 + 0.8) / 4 = 0.4; head 1: mean 1.0.
    # Threshold 0.5, so the centre is 0.5 ln 4 = 0.6931; margin 0.2, so the half-width is 0.2773.
    # Head 0: d = 0.4 - 0.6931 = -0.2931, outside, penalty 0.08593. Head 1: d = 0.3069, outside, penalty 0.09416.
    rows = [[[[0.0, 0.2, 0.6, 0.8], [0.7, 0.9, 1.1, 1.3]]]]
    _, value = penalty(rows, margin=0.2, threshold_init=0.5)
    assert value.item() == pytest.approx(((0.4 - 0.5 * LARGEST) ** 2 + (1.0 - 0.5 * LARGEST) ** 2) / 2)
    # A wider band, 0.3 x 1.3863 = 0.4159, holds both.
    assert penalty(rows, margin=0.3, threshold_init=0.5)[1].item() == 0.0
    # Centre 0.6931, half-width 0.2773: of the rows 0.0, 0.6, 0.8, 1.2 the first and the last are outside.
    _, value = penalty([[[[0.0, 0.6, 0.8, 1.2]]]], form="published-code", margin=0.2, threshold_init=0.5)
    assert value.item() == pytest.approx((0.0 - 0.5 * LARGEST) ** 2 + (1.2 - 0.5 * LARGEST) ** 2)


def test_causal_maximum_by_hand():
    # Rows can reach ln 1, ln 2, ln 3, ln 4 = 0, 0.6931, 1.0986, 1.3863; their mean is ln(4!) / 4 = 0.7945.
    # Threshold 0.5, margin 0.2. Mean form: the head's mean is 0.65, d = 0.65 - 0.3973 = 0.2527 > 0.1589.
    rows = [[[[0.0, 0.6, 0.8, 1.2]]]]
    _, value = penalty(rows, maximum="causal", margin=0.2, threshold_init=0.5)
    assert value.item() == pytest.approx((0.65 - 0.5 * math.log(24) / 4) ** 2)
    # By rows: d = 0, 0.2534 > 0.1386, 0.2507 > 0.2197, 0.5069 > 0.2773; the first row cannot be outside its band.
    _, value = penalty(rows, form="published-code", maximum="causal", margin=0.2, threshold_init=0.5)
    expected = sum((row - 0.5 * math.log(i)) ** 2 for i, row in ((2, 0.6), (3, 0.8), (4, 1.2)))
    assert value.item() == pytest.approx(expected)


def test_the_weight_is_constant_or_rises_linearly():
    assert {EntropyRegularisation(weight=0.4).weight_at(step, 10) for step in range(10)} == {0.4}
    rising = EntropyRegularisation(weight=0.4, warmup_share=0.4)
    assert [rising.weight_at(step, 10) for step in (0, 1, 3, 4, 9)] == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.4])


def test_mean_form_does_not_depend_on_the_batch_and_the_summed_one_doubles_with_it():
    entropies = torch.rand(2, 1, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    repeated = entropies.repeat(1, 2, 1, 1)
    factors: dict[PenaltyForm, int] = {"mean": 1, "published-code": 2}
    for form, factor in factors.items():
        module = EntropyPenalty(EntropyRegularisation(form=form, margin=0.0), num_layers=2, num_heads=3)
        assert module(repeated).item() == pytest.approx(factor * module(entropies).item())


@pytest.mark.parametrize("form", ["mean", "published-code"])
def test_layers_of_unlike_heads_count_by_their_heads(form):
    # Three heads in one layer, or as 2 + 0 + 1 in three: the same penalty, and gradients for the thresholds that count.
    rows = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # batch x heads x T
    settings = EntropyRegularisation(form=form, margin=0.0)
    together = EntropyPenalty(settings, num_layers=1, num_heads=3)([rows])
    module = EntropyPenalty(settings, num_layers=3, num_heads=2)
    apart = module([rows[:, :2], rows[:, :0], rows[:, 2:]])
    assert apart.item() == pytest.approx(together.item())
    apart.backward()
    assert (module.thresholds.grad != 0).tolist() == [[True, True], [False, False], [True, False]]


def test_thresholds_learn_towards_the_entropies_they_see():
    module, value = penalty([[[[1.3] * 4]]], threshold_init=0.3)
    value.backward()
    gradient = module.thresholds.grad
    # d(E - theta ln T)^2 / d theta = -2 ln T (E - theta ln T): negative, so a descent step raises theta.
    assert gradient.item() == pytest.approx(-2 * LARGEST * (1.3 - 0.3 * LARGEST), rel=1e-6)


def test_diagnosis_counts_quarters_collapse_and_overload():
    # Largest mean 4.0, T = 128: quarters end at 1, 2, 3; collapse below 0.02 ln 128 = 0.097.
    summary = summarise([torch.tensor([0.05, 0.5, 1.5, 2.5]), torch.tensor([3.0, 3.5, 4.0, 0.99])], 128)
    assert (summary.quarter_shares, summary.num_collapsed) == ((3 / 8, 1 / 8, 1 / 8, 3 / 8), 1)
    assert summary.flags == ("entropy-collapse", "entropic-overload")

    assert summarise([torch.tensor([1.0, 1.5, 2.5, 4.0])], 128).flags == ()  # an even spread raises none
    summary = summarise([torch.zeros(2)] * 2, 128)
    assert (summary.num_collapsed, summary.quarter_shares) == (4, (1.0, 0.0, 0.0, 0.0))
    summary = summarise([torch.tensor([1.0, 4.0]), torch.zeros(0), torch.tensor([2.0])], 128)
    assert summary.head_means == ((1.0, 4.0), (), (2.0,))
    assert summary.quarter_shares == (0.0, 1 / 3, 1 / 3, 1 / 3)


def test_impossible_settings_and_entropies_are_refused():
    with pytest.raises(ValueError, match="must be finite"):
        summarise([torch.tensor([1.0, math.nan])], 128)
    bad: Any
    for bad in ({"weight": -1.0}, {"margin": 2.0}, {"threshold_init": math.nan}, {"warmup_share": 1.1}):
        with pytest.raises(ValueError, match="entropy regularisation needs"):
            EntropyRegularisation(**bad)


@pytest.mark.parametrize("num_heads", [0, 1])
def test_layers_may_all_have_fewer_heads_than_there_are_thresholds(num_heads):
    """So it is once the gates of attention have closed, in all layers or all but half of the heads."""
    module = EntropyPenalty(EntropyRegularisation(), num_layers=2, num_heads=2)
    value = module([torch.full((3, num_heads, 4), 0.1, requires_grad=True)] * 2)
    value.backward()
    assert value.isfinite()
    assert (value > 0) == (num_heads > 0)
