"""The learning-rate schedule by hand, and which parameters decay."""

from dataclasses import replace

import pytest
import torch

from nas.recipe.recipe import SCALES, EntropyRegularisation, RateSchedule, Recipe
from nas.training.objective import Objective
from nas.training.optimizer import adamw, learning_rate
from tests.nas.training.short_runs import candidate

# 100 steps of 8 x 32 tokens, 10 of them warm-up, peak 1, floor 0.1.
SCALE = replace(SCALES["smoke"], tokens=100 * 256, warmup_share=0.1, learning_rate=1.0)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ("cosine", 0, 0.1),
        ("cosine", 9, 1.0),
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.55),  # half way from 10 to 100: 0.1 + 0.9 x (1 + cos(pi / 2)) / 2
        ("linear", 55, 0.55),
        ("linear", 91, 0.19),  # 0.1 + 0.9 x 9 / 90
        ("cosine", 85, 0.1603),  # 75 of 90 steps are 150 degrees: 0.1 + 0.9 x (1 - 0.8660) / 2
    ],
)
def test_schedule_by_hand(schedule: RateSchedule, step: int, rate: float) -> None:
    assert learning_rate(Recipe(scale=SCALE, schedule=schedule), step) == pytest.approx(rate, abs=1e-4)


def test_only_weights_of_linears_and_tables_decay() -> None:
    made = candidate("1xLTLKs-1xoSoFs", SCALE, entropy=EntropyRegularisation())
    objective = Objective(made, torch.Generator().manual_seed(0))
    names = {id(parameter): name for name, parameter in objective.named_parameters()}
    decayed, rest = adamw(objective, made.recipe).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    kinds = {names[id(parameter)].removeprefix("model.layers.0.") for parameter in decayed["params"]}
    assert {kind for kind in kinds if not kind.startswith("model.")} == {
        "attention.qkv.weight",
        "attention.out.weight",
        "ffn.up.weight",
        "ffn.down.weight",
    }
    undecayed = {names[id(parameter)].rpartition(".")[2] for parameter in rest["params"]}
    assert undecayed == {"weight", "bias", "log_weight", "slope", "alpha", "beta", "thresholds"}
