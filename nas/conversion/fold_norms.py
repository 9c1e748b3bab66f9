"""Norms into the linears that read them: gain and bias of live ones, frozen ones as a whole."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from costmodel import ops
from nas.conversion.fold_linears import Weights, add_constant, change_input, change_output, first_linear
from search_spaces.architecture import LIVE_NORMS, Architecture, Layer, Norm
from search_spaces.deployed import folds_final_norm
from search_spaces.lower import lower


def fold_norms(architecture: Architecture, weights: Weights) -> Architecture:
    """W (gain (x - mean x) + bias) + b as a linear of x, or, behind a live norm, of what is normalised.

    A norm that values are read from without a linear between stays: no linear takes it up.
    """
    readers = list(_readers(architecture))
    for norm, kind, linears in readers:
        matrix, shift = _taken_up(weights, norm, kind)
        for linear in linears:
            change_input(weights, linear, matrix, shift)
    return replace(
        architecture,
        layers=tuple(
            _without_frozen(layer, architecture.block_facts.passes_values(index))
            for index, layer in enumerate(architecture.layers)
        ),
    )


def fold_final_norm(architecture: Architecture, weights: Weights) -> Architecture:
    """A frozen final norm into the vocabulary projection, which has no bias.

    Of one that is centred the bias is brought in by the mean of the stream, where every reader takes that away: all
    that is added to the stream is centred, and at the end it is given a mean of 1.
    """
    kind = architecture.final_norm
    if kind == "none" or not folds_final_norm(architecture):
        return architecture
    matrix, bias = _taken_up(weights, "final_norm", kind)
    if kind == "frozen-layernorm":
        _centre_writers(architecture, weights)
        add_constant(architecture, weights, architecture.num_layers, torch.ones_like(bias))
        matrix = matrix + bias[:, None] / len(bias)
    weights["logits.weight"] = weights["logits.weight"] @ matrix
    return replace(architecture, final_norm="none", tied_embeddings=False)


def _centre_writers(architecture: Architecture, weights: Weights) -> None:
    """Everything that is added to the stream, less its mean. The kept FFNs' betas do not change a mean of 0."""
    centring = _centring(architecture.d_model)
    for table in architecture.block_facts.tables:
        weights[f"{table}.weight"] = weights[f"{table}.weight"] @ centring
    for name in [name.removesuffix(".weight") for name in weights]:
        if name.endswith((".attention.out", ".ffn.down", ".ffn.fused")):
            change_output(weights, name, centring)


def _readers(architecture: Architecture) -> Iterator[tuple[str, Norm, list[str]]]:
    """The norms that linears alone read, their kinds, and those linears."""
    for index, layer in enumerate(architecture.layers):
        name = f"layers.{index}"
        if layer.norm1 != "none" and (linears := architecture.block_facts.norm1_readers(index)):
            yield f"{name}.norm1", layer.norm1, [f"{name}.{linear}" for linear in linears]
        if layer.norm2 != "none":
            yield f"{name}.norm2", layer.norm2, [first_linear(index, layer)]


def _taken_up(weights: Weights, norm: str, kind: Norm) -> tuple[Tensor, Tensor]:
    """The linear part of a norm as matrix and shift; its weights are gone."""
    gain = weights.pop(f"{norm}.weight")
    shift = weights.pop(f"{norm}.bias", torch.zeros_like(gain))
    matrix = torch.diag(gain)
    return (matrix @ _centring(len(gain)) if kind == "frozen-layernorm" else matrix), shift


def _centring(features: int) -> Tensor:
    """x - mean x as a matrix."""
    return torch.eye(features, dtype=torch.float64) - 1 / features


def _without_frozen(layer: Layer, keeps_norm1: bool) -> Layer:
    return replace(
        layer,
        norm1=layer.norm1 if keeps_norm1 or layer.norm1 in LIVE_NORMS else "none",
        norm2=layer.norm2 if layer.norm2 in LIVE_NORMS else "none",
    )


def with_biases(architecture: Architecture, weights: Weights) -> Architecture:
    """The same model, with biases of 0 if it has none."""
    if architecture.bias:
        return architecture
    for node in lower(architecture, 1):
        if isinstance(node.op, ops.Linear):
            weights[f"{node.name}.bias"] = torch.zeros(node.op.out_features, dtype=torch.float64)
    return replace(architecture, bias=True)
