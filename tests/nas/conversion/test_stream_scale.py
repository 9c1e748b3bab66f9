import numpy as np
import pytest
import torch

from costmodel.execution import interpreter
from nas.conversion.fold import at_dimensions
from nas.conversion.stream_scale import factor_for, with_stream_scale
from nas.conversion.verified_fold import Reference, fold_as_far_as
from nas.model.decoder import build
from nas.model.weights import deployed_weights
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import parse

TOKENS = np.random.default_rng(5).integers(24, size=(2, 8))
SMALL = Dimensions(vocab=24, context=8)
LLAMA = base_architecture("smollm2-135m", Dimensions(layers=2, heads=4, kv_heads=2, d_model=16, d_ff=40, vocab=24))


@pytest.mark.parametrize(
    ("share", "factor"), [(0.0, 1.0), (0.99, 1.0), (1.0, 0.5), (4.0, 0.25), (9.4, 0.25), (16, 0.125)]
)
def test_the_factor_is_no_smaller_than_it_must_be(share: float, factor: float) -> None:
    assert factor_for(share) == factor


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("2xMSMWo", LLAMA),
        ("1xMHMQo-1xoSoFo", LLAMA),
        ("1xooMRo-1xmSmRs", base_architecture("tiny", SMALL)),
        ("1xMSoIs-1xoHmRo", base_architecture("tiny", SMALL)),
    ],
)
def test_it_changes_no_logit_and_fits(name: str, base: Architecture) -> None:
    architecture = parse(name, base).architecture
    model = build(architecture, torch.Generator().manual_seed(0))
    weights = {name: value.double() for name, value in deployed_weights(model).items()}
    massive = with_stream_scale(architecture, weights, 2.0**18)
    for tokens in TOKENS:
        logits = [
            interpreter.execute(lower(variant, 8), {name: value.numpy() for name, value in values.items()}, tokens)
            for variant, values in ((architecture, weights), massive)
        ]
        np.testing.assert_allclose(logits[1], logits[0], rtol=1e-12, atol=1e-12 * np.abs(logits[0]).max())
    reference = Reference.of(*massive, TOKENS)
    assert reference.architecture.norm_epsilon < massive[0].norm_epsilon
    folded, check = fold_as_far_as(*massive, TOKENS)
    assert check.fits
    assert check.float_error < 1e-5
    assert at_dimensions(folded.architecture, architecture) == deployed(architecture)


def test_a_layer_norm_is_left_and_told() -> None:
    architecture = parse("SM+LN+G", base_architecture("tiny", SMALL)).architecture
    weights = dict(deployed_weights(build(architecture, torch.Generator().manual_seed(0))))
    weights["embed.weight"] = weights["embed.weight"] * 2.0**20
    _, check = fold_as_far_as(architecture, weights, TOKENS)
    assert not check.fits
