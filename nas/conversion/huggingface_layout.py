"""Converts the weights of a family of transformers to ours, by node, and back."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from search_spaces.architecture import Architecture
from search_spaces.checkpoints.families import Family

LINEAR_WEIGHTS = tuple(f".{linear}.weight" for linear in ("qkv", "out", "up", "down"))  # of a layer


def from_theirs(family: Family, architecture: Architecture, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights, by node of the op graph. state: the weights of transformers, by their name there."""
    weights: dict[str, Tensor] = {}
    for theirs, ours in their_names(family, architecture):
        if theirs in state:
            parts = state[theirs].chunk(len(ours))  # several of our weights are stacked in one of theirs
            weights |= {
                name: _laid_out(family, name, part, architecture.num_heads, 3)
                for name, part in zip(ours, parts, strict=True)
            }
    for name in weights:
        weights[name] = weights[name] + family.gain_offset if _is_gain(name) else weights[name]
    if family.first_position:
        weights["position.weight"] = weights["position.weight"][family.first_position :]
    return weights


def to_theirs(family: Family, architecture: Architecture, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of transformers by their name there. weights: ours, by node of the op graph.

    Rows of their position table that no position of ours fills are 0.
    """
    weights = {name: value - family.gain_offset if _is_gain(name) else value for name, value in weights.items()}
    state = {
        theirs: torch.cat([_laid_out(family, name, weights[name], 3, architecture.num_heads) for name in ours])
        for theirs, ours in their_names(family, architecture)
        if ours[0] in weights
    }
    if family.first_position:
        (name,) = (theirs for theirs, ours in family.names.items() if ours == "position")
        table = state[f"{name}.weight"]
        state[f"{name}.weight"] = torch.cat((table.new_zeros(family.first_position, table.shape[1]), table))
    return state


def _is_gain(name: str) -> bool:
    return name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))


def their_names(family: Family, architecture: Architecture) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name in transformers, and our names, of every weight that may exist."""
    for theirs, modules in family.names.items():
        ours = (modules,) if isinstance(modules, str) else modules
        for index in range(architecture.num_layers if "{}" in theirs else 1):
            for suffix in ("weight", "bias"):
                yield f"{theirs.format(index)}.{suffix}", tuple(f"{name.format(index)}.{suffix}" for name in ours)


def _laid_out(family: Family, name: str, value: Tensor, outer: int, inner: int) -> Tensor:
    """Convert the layout of one weight, to or from theirs. name: ours. No family both transposes and interleaves."""
    if family.interleaved and ".qkv." in name:  # rows of outer x inner x head_dim as inner x outer x head_dim
        value = value.view(outer, inner, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
    return value.T if family.transposed and name.endswith(LINEAR_WEIGHTS) else value
