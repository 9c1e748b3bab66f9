"""Polynomials in place of an activation: exact where they can be, fitted to all sequences, and at all positions."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nas.conversion import linear_fit
from nas.conversion.linear_fit import fit_polynomial
from nas.model.decoder import build
from search_spaces.forms import Ffn
from tests.small_models import LLAMA


def layer_with(ffn: Ffn, seed: int = 0) -> Any:
    layers = tuple(replace(layer, ffn=ffn) for layer in LLAMA.layers)
    return build(replace(LLAMA, layers=layers), torch.Generator().manual_seed(seed)).layers[0]


@pytest.fixture
def read() -> torch.Tensor:
    """Inputs of a layer, sequences x T x d_model; the first position's numbers are far larger."""
    torch.manual_seed(0)
    read = torch.randn(12, 16, LLAMA.d_model)
    read[:, 0] *= 40
    return read


@torch.no_grad()
def outputs(layer: Any, read: torch.Tensor) -> torch.Tensor:
    return layer(read, False)[0]


def errors(theirs: Any, read: torch.Tensor, fitted_to: slice = slice(None)) -> torch.Tensor:
    """Relative errors of the outputs of a fitted quadratic gate, sequences x T."""
    ours, left = layer_with("quadglu", seed=1), outputs(theirs, read)
    ours.norm2 = theirs.norm2
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if "ffn" not in k or "down" in k}, strict=False)
    fit_polynomial(ours, theirs, read[fitted_to], left[fitted_to], degree=2)
    return ((outputs(ours, read) - left).square().mean(dim=2) / (left - read).square().mean(dim=2)).sqrt()


def test_a_polynomial_is_found_whatever_the_weights(read):
    assert errors(layer_with("quadglu", seed=2), read).max() < 1e-3


def test_a_fit_is_to_all_sequences(read):
    theirs = layer_with("swiglu")
    theirs.ffn.gate.weight.data *= 20
    assert errors(theirs, read)[1:].mean() < errors(theirs, read, slice(1))[1:].mean()


def test_large_numbers_at_a_position_do_not_decide_alone(read, monkeypatch):
    theirs = layer_with("swiglu")
    theirs.norm2 = torch.nn.Identity()  # which would make all positions alike
    weighted = errors(theirs, read)
    monkeypatch.setattr(linear_fit, "weights_by_position", lambda read, left: torch.ones(read.shape[1]))
    unweighted = errors(theirs, read)
    assert weighted[:, 1:].mean() < 0.5 * unweighted[:, 1:].mean()
    assert weighted[:, 0].mean() < 0.25
