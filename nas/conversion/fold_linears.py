"""How a linear takes up what is done to its input or to its result, and which linears read and write the stream.

Weights are in double precision, by `<node>.<suffix>`; the functions that change them do it in place.
"""

import torch
from torch import Tensor

from search_spaces.architecture import Architecture, Layer

Weights = dict[str, Tensor]


def change_input(weights: Weights, linear: str, matrix: Tensor, shift: Tensor) -> None:
    """W (matrix @ x + shift) + b as one linear of x; a linear without a bias is given no shift but 0."""
    weight = weights[f"{linear}.weight"]
    weights[f"{linear}.weight"] = weight @ matrix
    if f"{linear}.bias" in weights:
        weights[f"{linear}.bias"] = weights[f"{linear}.bias"] + weight @ shift


def change_output(weights: Weights, linear: str, factor: Tensor) -> None:
    """A linear whose result is multiplied by a scalar or, from the left, by a matrix."""
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in weights:
            weights[name] = factor * weights[name] if factor.ndim == 0 else factor @ weights[name]


def scale_rows(weights: Weights, linear: str, factors: Tensor) -> None:
    """The first rows of a linear, times a factor each."""
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in weights:
            value = weights[name]
            padded = torch.cat((factors, factors.new_ones(len(value) - len(factors))))
            weights[name] = value * padded.view(-1, *[1] * (value.ndim - 1))


def add_constant(architecture: Architecture, weights: Weights, num_layers: int, constant: Tensor) -> None:
    """What the stream is given behind its first layers: by the last linear that writes to it, or else by a table.

    constant: d_model, in the coordinates of that linear's result.
    """
    name = f"{last_writer(architecture, num_layers) or architecture.block_facts.tables[-1]}"
    suffix = "bias" if f"{name}.bias" in weights else "weight"
    weights[f"{name}.{suffix}"] = weights[f"{name}.{suffix}"] + constant


def last_writer(architecture: Architecture, num_layers: int) -> str | None:
    """The last linear that adds to the stream in the first layers."""
    for index in reversed(range(num_layers)):
        layer = architecture.layers[index]
        if layer.ffn != "none":
            return last_linear(index, layer)
        if layer.attention != "none":
            return f"layers.{index}.attention.out"
    return None


def first_linear(index: int, layer: Layer) -> str:
    return f"layers.{index}.ffn.{'fused' if layer.ffn == 'fused' else 'up'}"


def last_linear(index: int, layer: Layer) -> str:
    return f"layers.{index}.ffn.{'fused' if layer.ffn == 'fused' else 'down'}"
