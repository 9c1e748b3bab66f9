from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nas.conversion.fold import fold
from nas.conversion.verified_fold import FIXED_POSITIONS, RESOLUTION, FoldCheck, Reference, fold_as_far_as
from nas.model.decoder import build
from nas.model.weights import deployed_weights
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.deployed import deployed
from search_spaces.notation import parse

BASE = base_architecture("tiny", Dimensions(layers=6, heads=2, d_model=16, vocab=24, context=32))
TOKENS = np.random.default_rng(5).integers(24, size=(20, 32))
GOOD = FoldCheck(
    positions=640,
    float_error=1e-4,
    agreement=0.999,
    fixed_error=7e-5,
    trained_fixed_error=3e-5,
    fixed_divergence=2e-3,
    resolution=1e-5,
    fits=True,
)


def model(notation: str, *, shrink: float = 1.0) -> tuple[Architecture, dict[str, Tensor]]:
    """A model whose FFNs, where they are fused, leave half of the stream as it is and shrink the other half."""
    architecture = parse(notation, BASE).architecture
    weights = deployed_weights(build(architecture, torch.Generator().manual_seed(0)))
    rotation, _ = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
    change = torch.diag(torch.cat((torch.zeros(8), torch.full((8,), shrink - 1))))
    for name in weights:
        if name.endswith("fused.weight"):
            weights[name] = rotation @ change @ rotation.T
    return architecture, {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({}, True),  # each bar may be met exactly
        ({"float_error": 1.01e-4}, False),
        ({"float_error": float("nan")}, False),
        ({"agreement": 0.9989}, False),
        ({"fixed_error": 7.01e-5}, False),  # twice the trained model's, and a resolution
        ({"fixed_error": 7.01e-5, "fixed_divergence": 1e-3}, True),  # no prediction moves
        ({"fixed_error": 7.01e-5, "fixed_divergence": 1e-3, "fits": False}, False),
        ({"fixed_error": float("nan"), "fixed_divergence": float("nan")}, False),
        ({"fits": False}, False),
    ],
)
def test_every_bar_counts(change: dict[str, Any], passes: bool) -> None:
    assert replace(GOOD, **change).passes == passes


def test_a_well_conditioned_model_is_folded_as_the_rule_says() -> None:
    architecture, weights = model("SM+ScFuFFN", shrink=0.7)
    folded, check = fold_as_far_as(architecture, weights, TOKENS)
    assert folded.architecture == deployed(architecture)
    assert check.passes
    assert check == Reference.of(architecture, weights, TOKENS).check(folded)
    assert check.positions == TOKENS.size > FIXED_POSITIONS
    assert 0 < check.float_error < 1e-5
    assert RESOLUTION / 100 < check.trained_fixed_error < 1e-3


def test_folding_goes_back_until_fixed_point_holds_it() -> None:
    """Six layers that shrink a direction fiftyfold: all of them together are more than 18 fraction bits can hold."""
    architecture, weights = model("SM+ScFuFFN", shrink=0.02)
    everything = fold(architecture, weights, max_condition=1e15)
    assert everything.left == ()
    assert not Reference.of(architecture, weights, TOKENS).check(everything).keeps_precision
    folded, check = fold_as_far_as(architecture, weights, TOKENS)
    assert check.keeps_precision
    assert 0 < len(folded.left) < 6
    assert folded.condition < everything.condition


def test_a_model_that_was_folded_wrongly_fails() -> None:
    architecture, weights = model("SM+ScFuFFN", shrink=0.7)
    folded = fold(architecture, weights)
    name = "layers.3.attention.out.weight"
    moved = folded._replace(weights={**folded.weights, name: 1.01 * folded.weights[name]})
    check = Reference.of(architecture, weights, TOKENS).check(moved)
    assert check.float_error > 1e-4
    assert not check.passes


def test_what_the_ring_cannot_hold_is_told() -> None:
    """The same function, with a stream of 2^28: its products have 2^36 times as much, beyond 63 bits."""
    architecture, weights = model("SM_i6-o")
    folded = fold(architecture, weights)
    factor = 2.0**28
    large = dict(folded.weights)
    for name in large:
        if name.startswith(("embed.", "position.")) or name.endswith(("out.weight", "out.bias")):
            large[name] = large[name] * factor
        elif name.endswith(("qkv.weight", "logits.weight")):
            large[name] = large[name] / factor
    check = Reference.of(architecture, weights, TOKENS).check(folded._replace(weights=large))
    assert check.float_error < 1e-5
    assert not check.fits
    assert not check.passes
