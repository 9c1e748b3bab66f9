"""Changes of basis of the residual stream that turn linear FFNs into the identity.

Apart from what attention and nonlinear FFNs add, a layer maps the stream X to `S X + c`, where S is beta, plus W if its
FFN is linear. With X_i = B_i z + o_i before layer i, B_(i+1) = S_i B_i and o_(i+1) = S_i o_i + c_i, the layer leaves
the coordinates z unchanged. Linears that read the stream are multiplied by B and shifted by o, those that write to it
are multiplied by B^-1, the embedding tables by B_0^-1 and the vocabulary projection by the last B. The last linear that
writes to the stream also adds the last o.

Where a live norm (one that is not frozen) reads the stream, B is the identity and o is 0. Without live norms, B_0 is
free; see `balanced`. Weights are in double precision, named `<node>.<suffix>`, and changed in place.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from search_spaces.architecture import Architecture, Layer
from search_spaces.deployed import absorbs, regions
from search_spaces.forms import FFNS, Norm
from search_spaces.inner import inner_norms

Weights = dict[str, Tensor]


class _Step(NamedTuple):
    """A layer's linear map of the stream, X' = matrix X + shift, and how much of it the basis takes up.

    taken: `matrix`, or the identity at level 0. level: 2 if the basis takes up beta and the fused FFN, 1 if only beta,
    else 0.
    """

    matrix: Tensor
    shift: Tensor
    taken: Tensor
    level: int


class Basis(NamedTuple):
    """A basis B of the stream (`axes`) and B^-1 (`inverse`), each d_model x d_model."""

    axes: Tensor
    inverse: Tensor


def rebase(
    architecture: Architecture, weights: Weights, max_condition: float
) -> tuple[tuple[Layer, ...], float, tuple[str, ...]]:
    """Fold linear FFNs and betas into changes of basis of the residual stream; change `weights` in place.

    Before, linear FFNs must be fused, alphas 1 and frozen norms folded. max_condition: limit of the condition number,
        which bounds the factor by which a vector written in one layer's basis grows in another's.
    Returns the layers, with `none` for each folded FFN; the condition number reached, at least 1; and texts that say
    which FFNs and betas were not folded, and why.
    """
    layers, left, condition = list(architecture.layers), [], 1.0
    around, num_layers = regions(architecture), architecture.num_layers
    ahead, behind = (sum(getattr(region, side) for region in around) for side in ("ahead", "behind"))
    # layers with one chain of bases, and the end where the basis must be the identity
    stretches = [(0, ahead, "stop"), (num_layers - behind, num_layers, "start")]
    if ahead == behind == num_layers:
        stretches = [(0, num_layers, "free")]
    for start, stop, plain in stretches:
        if start == stop:
            continue
        steps, bases, reasons = _chosen(architecture, weights, range(start, stop), plain, max_condition)
        left += reasons
        condition = max(condition, _condition(bases))
        _move(architecture, weights, start, steps, bases)
        if start == 0 and not architecture.block_facts.is_shaped:
            for table in architecture.block_facts.tables:
                weights[f"{table}.weight"] = weights[f"{table}.weight"] @ bases[0].inverse.T
        if stop == num_layers:
            weights["logits.weight"] = weights["logits.weight"] @ bases[-1].axes
        for index, step in enumerate(steps, start):
            for name in ("residual.alpha", "residual.beta", "fused.weight", "fused.bias")[: 2 * step.level]:
                weights.pop(f"layers.{index}.ffn.{name}", None)
            if step.level:
                layers[index] = replace(layers[index], stabiliser="none")
            if step.level == 2:
                layers[index] = replace(layers[index], norm2="none", ffn="none")
        origin = _origins(steps)[-1]
        if origin.any():
            behind_them = replace(architecture, layers=tuple(layers))
            add_constant(behind_them, weights, stop, bases[-1].inverse @ origin)
    return tuple(layers), condition, tuple(left)


def _chosen(
    architecture: Architecture, weights: Weights, stretch: range, plain: str, max_condition: float
) -> tuple[list[_Step], list[Basis], list[str]]:
    """Take up as much as possible: while the condition is too high, lower the level of the worst-conditioned step.

    stretch: indices of the layers. plain: the end whose basis must be the identity, `start` or `stop`, or `free`.
    Returns steps, bases, and the reason for every level that was lowered.
    """
    layers, around = architecture.layers, regions(architecture)
    levels = {index: 2 if absorbs(architecture.block_facts, layers[index], around[index]) else 1 for index in stretch}
    reasons: list[str] = []
    while True:
        steps = [_step(architecture, weights, index, level) for index, level in levels.items()]
        spreads = [_spread(step.taken) for step in steps]
        worst = max(range(len(steps)), key=spreads.__getitem__)
        condition = spreads[worst]
        if condition <= max_condition or spreads[worst] == 1:  # no level can be lowered
            bases = _bases(steps, plain)
            condition = _condition(bases)
            if condition <= max_condition or spreads[worst] == 1:
                return steps, bases, reasons
        index = stretch[worst]
        part = "ffn" if levels[index] == 2 else "ffn.residual"
        reasons.append(f"layers.{index}.{part}: a basis of condition {condition:.1e}, above {max_condition:.1e}")
        levels[index] -= 1


def _step(architecture: Architecture, weights: Weights, index: int, level: int) -> _Step:
    ffn, identity = f"layers.{index}.ffn", torch.eye(architecture.d_model, dtype=torch.float64)
    matrix = weights.get(f"{ffn}.residual.beta", torch.ones((), dtype=torch.float64)) * identity
    shift = torch.zeros(architecture.d_model, dtype=torch.float64)
    if level == 2:
        matrix = matrix + weights[f"{ffn}.fused.weight"]
        shift = weights.get(f"{ffn}.fused.bias", shift)
    return _Step(matrix, shift, matrix if level else identity, level)


def _spread(matrix: Tensor) -> float:
    """Return max(1, norm of the matrix) times max(1, norm of its inverse), which is 1 for an orthogonal matrix."""
    values = torch.linalg.svdvals(matrix)
    return float(values[0].clamp(min=1) / values[-1].clamp(max=1))


def _bases(steps: list[_Step], plain: str) -> list[Basis]:
    """Return the bases before every layer and after the last."""
    identity = torch.eye(len(steps[0].shift), dtype=torch.float64)
    bases = [Basis(identity, identity)]
    for step in steps:
        bases.append(Basis(step.taken @ bases[-1].axes, bases[-1].inverse @ torch.linalg.inv(step.taken)))
    if plain == "start" or all(torch.equal(step.taken, identity) for step in steps):
        return bases
    first = Basis(bases[-1].inverse, bases[-1].axes) if plain == "stop" else balanced(bases)
    return [Basis(basis.axes @ first.axes, first.inverse @ basis.inverse) for basis in bases]


def balanced(bases: list[Basis]) -> Basis:
    """Return the best first basis B_0 of a model without live norms.

    bases: those before every layer and after the last, for B_0 = 1. With the result, weights that read the
    stream and weights that write to it grow equally: P, the sum of B^-1 B^-T over the bases, and Q, the sum of B^T B,
    become the same diagonal matrix. No other B_0 has a smaller trace of P + Q.

    Source: Moore 1981, "Principal component analysis in linear systems", https://doi.org/10.1109/TAC.1981.1102568, for
    balanced coordinates; Laub et al. 1987, "Computation of system balancing transformations",
    https://doi.org/10.1109/TAC.1987.1104549, for computing them from square roots of P and Q.
    """
    written = torch.linalg.qr(torch.cat([basis.inverse.T for basis in bases])).R  # P is R^T R, for B_0 = 1
    read = torch.linalg.qr(torch.cat([basis.axes for basis in bases])).R  # Q is R^T R
    left, sizes, right = torch.linalg.svd(read @ written.T)
    scale = sizes**-0.5
    return Basis(written.T @ right.T * scale, (left * scale).T @ read)


def _condition(bases: list[Basis]) -> float:
    """Return a bound on the factor by which a vector written in one of the bases grows in another."""
    return float(
        max(torch.linalg.matrix_norm(basis.axes, 2) for basis in bases)
        * max(torch.linalg.matrix_norm(basis.inverse, 2) for basis in bases)
    )


def _origins(steps: list[_Step]) -> list[Tensor]:
    """Return o before every layer and after the last."""
    origins = [torch.zeros_like(steps[0].shift)]
    for step in steps:
        origins.append(step.matrix @ origins[-1] + step.shift)
    return origins


def _move(architecture: Architecture, weights: Weights, start: int, steps: list[_Step], bases: list[Basis]) -> None:
    """Rewrite the layers' linears in the bases. Where they read a live norm, the basis is 1 and the origin 0.

    start: index of the first layer. steps: one per layer. bases: before each layer and after the last.
    """
    for index, (step, origin, before, after) in enumerate(zip(steps, _origins(steps), bases, bases[1:], strict=False)):
        at = start + index
        layer = architecture.layers[at]
        if layer.ffn != "none" and step.level < 2:
            for linear in first_linears(at, layer):
                change_input(weights, linear, before.axes, origin)
            change_output(weights, last_linear(at, layer), after.inverse)
        if layer.attention != "none" and architecture.block_facts.is_shaped:
            attention, norm_bias = f"layers.{at}.attention", f"layers.{at}.norm1.bias"
            if at == 0:  # its values become the stream; the basis is a multiple of the identity
                change_output(weights, f"{attention}.v", before.inverse)
            else:
                change_input(weights, f"{attention}.qk", before.axes, torch.zeros_like(origin))
                if norm_bias in weights:  # only a frozen norm has one
                    weights[norm_bias] = before.inverse @ weights[norm_bias]
        elif layer.attention != "none":
            for linear in architecture.block_facts.norm1_readers(at):
                change_input(weights, f"layers.{at}.{linear}", before.axes, origin)
            into = before.inverse
            if architecture.block_facts.join == "parallel" and step.level:  # next to the FFN: only beta multiplies it
                into = after.inverse * weights.get(f"layers.{at}.ffn.residual.beta", into.new_ones(()))
            change_output(weights, f"layers.{at}.attention.out", into)


def change_input(weights: Weights, linear: str, matrix: Tensor, shift: Tensor) -> None:
    """Make a linear, W x + b, compute W (matrix @ x + shift) + b; without a bias b, `shift` must be 0."""
    weight = weights[f"{linear}.weight"]
    weights[f"{linear}.weight"] = weight @ matrix
    if f"{linear}.bias" in weights:
        weights[f"{linear}.bias"] = weights[f"{linear}.bias"] + weight @ shift


def change_output(weights: Weights, linear: str, factor: Tensor) -> None:
    """Multiply the output of a linear by a scalar or, from the left, by a matrix."""
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in weights:
            weights[name] = factor * weights[name] if factor.ndim == 0 else factor @ weights[name]


def scale_rows(weights: Weights, linear: str, factors: Tensor) -> None:
    """Multiply the first rows of a linear or norm, weight and bias, by a factor each; rows beyond the factors stay."""
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in weights:
            value = weights[name]
            padded = torch.cat((factors, factors.new_ones(len(value) - len(factors))))
            weights[name] = value * padded.view(-1, *[1] * (value.ndim - 1))


def add_constant(architecture: Architecture, weights: Weights, num_layers: int, constant: Tensor) -> None:
    """Add a constant to the stream after the first `num_layers` layers, through the last node there that writes to it.

    It is added to the node's bias or, for an embedding table, to every row; any other node must have a bias.
    constant: d_model numbers, in the coordinates of that node's output.
    """
    name = stream_writers(architecture, num_layers)[-1]
    suffix = "bias" if f"{name}.bias" in weights else "weight"
    weights[f"{name}.{suffix}"] = weights[f"{name}.{suffix}"] + constant


def stream_writers(architecture: Architecture, num_layers: int) -> list[str]:
    """Return the nodes that write to the stream in the first layers, in order: tables, and sub-layers' last nodes."""
    writers = list(architecture.block_facts.tables)
    for index, layer in enumerate(architecture.layers[:num_layers]):
        attention = "attention.norm" if "attention.norm" in inner_norms(architecture, layer) else "attention.out"
        writers += [f"layers.{index}.{attention}"] if layer.attention != "none" else []
        writers += [ffn_writer(architecture, index)] if layer.ffn != "none" else []
    return writers


def ffn_writer(architecture: Architecture, index: int) -> str:
    """Return the name of the node that writes a layer's FFN output: the last linear or, if there is one, its norm."""
    layer = architecture.layers[index]
    return f"layers.{index}.ffn.norm" if "ffn.norm" in inner_norms(architecture, layer) else last_linear(index, layer)


def stream_readers(architecture: Architecture) -> Iterator[tuple[str, Norm, list[str]]]:
    """Yield, for each sub-layer, its norm's name and kind (maybe `none`), and the linears into which the norm folds."""
    for index, layer in enumerate(architecture.layers):
        name = f"layers.{index}"
        if layer.attention != "none":
            linears = [f"{name}.{linear}" for linear in architecture.block_facts.norm1_readers(index)]
            yield f"{name}.norm1", layer.norm1, linears
        if layer.ffn != "none":
            yield f"{name}.norm2", layer.norm2, first_linears(index, layer)


def first_linears(index: int, layer: Layer) -> list[str]:
    """Return the names of the linears that read the input of a layer's FFN."""
    names = ["fused"] if layer.ffn == "fused" else ["gate", "up"] if FFNS[layer.ffn].is_gated else ["up"]
    return [f"layers.{index}.ffn.{name}" for name in names]


def inner_norm_linears(architecture: Architecture) -> Iterator[tuple[str, Norm, str]]:
    """Yield each inner norm's node, its kind, and the node of the linear whose output it normalises."""
    for index, layer in enumerate(architecture.layers):
        for name, kind in inner_norms(architecture, layer).items():
            part, place = name.split(".")
            before = {"q_norm": "attention.q", "k_norm": "attention.k"}.get(place, f"{part}.out")
            linear = last_linear(index, layer) if part == "ffn" else f"layers.{index}.{before}"
            yield f"layers.{index}.{name}", kind, linear


def last_linear(index: int, layer: Layer) -> str:
    """Return the name of the last linear of a layer's FFN."""
    return f"layers.{index}.ffn.{'fused' if layer.ffn == 'fused' else 'down'}"
