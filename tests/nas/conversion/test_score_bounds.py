"""Bounds lie in the middle of the rows that they were set by, and a check tells where they do not hold."""

import numpy as np
import pytest
import torch

from costmodel.execution import interpreter
from nas.conversion.fold import fold
from nas.conversion.score_bounds import set_bounds
from nas.conversion.verified_fold import MAX_LOG_SUM, Reference
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

BASE = base_architecture("tiny", Dimensions(vocab=24, context=8))
TOKENS = np.random.default_rng(5).integers(24, size=(3, 8))


def bounded(name: str = "1xLBLBo-1xLSLGo") -> Decoder:
    model = build(parse(name, BASE).architecture, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(2 if "qk" in name else 1)
    return model


@pytest.mark.parametrize("name", ["1xLBLBo-1xLSLGo", "HH(2xLBLGo)"])
def test_a_bound_is_in_the_middle_of_the_rows_of_its_head(name: str) -> None:
    model = bounded(name)
    before = model(torch.from_numpy(TOKENS)).logits
    set_bounds(model, torch.from_numpy(TOKENS))
    assert torch.equal(model(torch.from_numpy(TOKENS)).logits, before)
    graph = lower(model.architecture, 8)
    weights = {key: value.numpy() for key, value in deployed_weights(model).items()}
    runs = [interpreter.values(graph, weights, sequence) for sequence in TOKENS]
    scores = np.stack([run["layers.0.attention.bound"] for run in runs], axis=1)  # heads x sequences x T x T
    sums = np.log(np.tril(np.exp(scores)).sum(axis=-1)).reshape(2, -1)
    np.testing.assert_allclose(sums.max(axis=1), -sums.min(axis=1), rtol=1e-4)
    assert sums.max() > 0.5


def test_a_bound_that_does_not_hold_is_told() -> None:
    model = bounded()
    set_bounds(model, torch.from_numpy(TOKENS))
    weights = {name: value.clone() for name, value in deployed_weights(model).items()}
    reference, folded = Reference.of(model.architecture, weights, TOKENS), fold(model.architecture, weights)
    assert reference.check(folded).passes
    bound = "layers.0.attention.bound.weight"
    off = reference.check(folded._replace(weights={**folded.weights, bound: folded.weights[bound] + 2 * MAX_LOG_SUM}))
    assert off.float_error < 1e-4
    assert not off.fits
