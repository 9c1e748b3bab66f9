"""Folding of a trained model for deployment: the same logits from fewer operations.

In order, wherever a layer has them:
- two FFN linears with nothing between them become one;
- alpha goes into the linear that it divides;
- beta, and a fused FFN as a whole, go into a change of basis of the residual stream, as far as the stream is read by
  linears alone: from the embedding, which takes up the change, to the first LayerNorm or the vocabulary projection;
- a temperature that is the same at every position of a head, and the factor 1/sqrt(head_dim) of the scores, go into
  the queries;
- gain and bias of a block's LayerNorm go into the linears that read it. Those of the final norm stay: the vocabulary
  projection has no bias.

Weights are named and shaped as `nas.model.weights.deployed_weights` gives them; the arithmetic is in double precision.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from costmodel import ops
from costmodel.errors import UserError
from search_spaces.architecture import Architecture, Layer
from search_spaces.lower import lower

MAX_CONDITION = 1e4  # of a basis; up to 1.5e3 the logits of trained models with 12 layers moved by 3e-7 of the largest

Weights = dict[str, Tensor]


class Folded(NamedTuple):
    """An architecture and weights that compute what others did; weights in single precision."""

    architecture: Architecture
    weights: Weights


class _Basis(NamedTuple):
    """Coordinates z of the residual stream, which is `axes @ z + origin`."""

    axes: Tensor
    origin: Tensor


def fold(architecture: Architecture, weights: Mapping[str, Tensor]) -> Folded:
    """Everything folded that can be. Raises UserError if a model is given that has been folded before."""
    if architecture.folded:
        raise UserError("only a model that is not folded yet can be folded, but got one with `folded: true`.")
    model = Folded(architecture, {name: value.double() for name, value in weights.items()})
    model = _fold_alphas(_fuse(model))
    model = _fold_norms(_fold_score_factors(_rebase(model)))
    return Folded(model.architecture, {name: value.float().contiguous() for name, value in model.weights.items()})


def folded_placement(architecture: Architecture, folded: Architecture) -> Architecture:
    """What folding did to the layers of `folded`, done to the same placement at other dimensions."""
    changes = ("layers", "bias", "tied_embeddings", "folded")
    return replace(architecture, **{name: getattr(folded, name) for name in changes})


def _fuse(model: Folded) -> Folded:
    """down @ (up @ x + up_bias) + down_bias as one linear."""
    weights, layers = dict(model.weights), list(model.architecture.layers)
    for index, layer in enumerate(layers):
        if layer.ffn == "identity":
            ffn = f"layers.{index}.ffn"
            up, down = weights.pop(f"{ffn}.up.weight"), weights.pop(f"{ffn}.down.weight")
            weights[f"{ffn}.fused.weight"] = down @ up
            if model.architecture.bias:
                up_bias, down_bias = weights.pop(f"{ffn}.up.bias"), weights.pop(f"{ffn}.down.bias")
                weights[f"{ffn}.fused.bias"] = down @ up_bias + down_bias
            layers[index] = replace(layer, ffn="fused")
    return Folded(replace(model.architecture, layers=tuple(layers)), weights)


def _fold_alphas(model: Folded) -> Folded:
    """1/alpha of every scaled addition, into the linear before it."""
    weights = dict(model.weights)
    for index, layer in enumerate(model.architecture.layers):
        if layer.stabiliser == "scaled":
            alpha = f"layers.{index}.ffn.residual.alpha"
            _scale_output(weights, _last_linear(index, layer), 1 / weights[alpha])
            weights[alpha] = torch.ones_like(weights[alpha])
    return Folded(model.architecture, weights)


def _rebase(model: Folded) -> Folded:
    """Each layer before the first norm in coordinates in which its beta is 1 and its fused FFN does nothing.

    Read backwards: the basis after the last such layer is the plain one, and the basis before a layer that computes
    X' = M A + c, plus what a nonlinear FFN adds, is that of X' taken back through M.
    Heads of block `sas` mix slices of the stream, which only a multiple of the identity leaves alone: nothing is
    absorbed there, and the stream starts at layer 0's values, not at the embedding.

    A fused FFN stays where the basis would be ill-conditioned, and everything does where a beta is 0.
    """
    architecture, weights, layers = model.architecture, dict(model.weights), list(model.architecture.layers)
    simplified = architecture.block == "sas"
    plain = _Basis(
        torch.eye(architecture.d_model, dtype=torch.float64), torch.zeros(architecture.d_model, dtype=torch.float64)
    )
    after = plain
    for index in reversed(range(_num_norm_free(architecture))):
        fused = not simplified and layers[index].ffn == "fused"
        absorbing = _basis_before(weights, f"layers.{index}", after, absorbed=True) if fused else None
        before = absorbing or _basis_before(weights, f"layers.{index}", after, absorbed=False)
        if before is None:
            return model
        absorbed = absorbing is not None
        if layers[index].ffn != "none" and not absorbed:
            _change_input_basis(weights, _first_linear(index, layers[index]), before)
            _scale_output(weights, _last_linear(index, layers[index]), torch.linalg.inv(after.axes))
        _rebase_attention(architecture, weights, index, before, after)
        layers[index] = replace(layers[index], stabiliser="none", ffn="none" if absorbed else layers[index].ffn)
        for name in ("residual.alpha", "residual.beta", *(("fused.weight", "fused.bias") if absorbed else ())):
            weights.pop(f"layers.{index}.ffn.{name}", None)
        after = before
    tied = architecture.tied_embeddings
    if not simplified and not all(map(torch.equal, after, plain)):
        _move_embedding(weights, after)
        tied = False
    return Folded(replace(architecture, layers=tuple(layers), tied_embeddings=tied), weights)


def _basis_before(weights: Weights, layer: str, after: _Basis, *, absorbed: bool) -> _Basis | None:
    """The basis before a layer, with its fused FFN in M or not; None if M or the basis is close to singular."""
    beta = weights.get(f"{layer}.ffn.residual.beta", torch.ones((), dtype=torch.float64))
    identity, origin = torch.eye(len(after.origin), dtype=torch.float64), after.origin
    step, size = beta * identity, beta.abs()
    if absorbed:
        fused = weights[f"{layer}.ffn.fused.weight"]
        step, size = step + fused, size + torch.linalg.matrix_norm(fused, 2)
        origin = origin - weights.get(f"{layer}.ffn.fused.bias", 0.0)
    if size == 0 or size > MAX_CONDITION * torch.linalg.svdvals(step)[-1]:
        return None
    before = _Basis(torch.linalg.solve(step, after.axes), torch.linalg.solve(step, origin))
    return before if torch.linalg.cond(before.axes) <= MAX_CONDITION else None


def _rebase_attention(architecture: Architecture, weights: Weights, index: int, before: _Basis, after: _Basis) -> None:
    """A `pythia` block adds its attention beside the FFN, so that only beta multiplies it and not M."""
    attention = f"layers.{index}.attention"
    into = torch.linalg.inv(before.axes)
    if architecture.block == "sas":
        if index == 0:
            _scale_output(weights, f"{attention}.v", into)
        else:
            _change_input_basis(weights, f"{attention}.qk", before)
        return
    _change_input_basis(weights, f"{attention}.qkv", before)
    if architecture.block == "pythia":
        beta = weights.get(f"layers.{index}.ffn.residual.beta", torch.ones((), dtype=torch.float64))
        into = torch.linalg.inv(after.axes) * beta
    _scale_output(weights, f"{attention}.out", into)


def _num_norm_free(architecture: Architecture) -> int:
    """Layers before the first one with a norm, not counting the norm ahead of layer 0's values in block `sas`."""
    for index, layer in enumerate(architecture.layers):
        source_norm = architecture.block == "sas" and index == 0
        if layer.norm2 == "layernorm" or (layer.norm1 == "layernorm" and not source_norm):
            return index
    return architecture.num_layers


def _move_embedding(weights: Weights, basis: _Basis) -> None:
    """Tables whose sum is the stream, in its new coordinates; the origin goes into one of them."""
    last = "position.weight" if "position.weight" in weights else "embed.weight"
    weights[last] = weights[last] - basis.origin
    for table in {"embed.weight", last}:
        weights[table] = torch.linalg.solve(basis.axes, weights[table].T).T


def _change_input_basis(weights: Weights, linear: str, basis: _Basis) -> None:
    """A linear that reads the stream, from its coordinates."""
    weight = weights[f"{linear}.weight"]
    weights[f"{linear}.weight"] = weight @ basis.axes
    if f"{linear}.bias" in weights:
        weights[f"{linear}.bias"] = weights[f"{linear}.bias"] + weight @ basis.origin


def _scale_output(weights: Weights, linear: str, factor: Tensor) -> None:
    """A linear whose result is multiplied by a scalar or, from the left, by a matrix."""
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in weights:
            weights[name] = factor * weights[name] if factor.ndim == 0 else factor @ weights[name]


def _fold_score_factors(model: Folded) -> Folded:
    """1/sqrt(head_dim) and temperatures that do not depend on the position, into the rows of the queries."""
    architecture, weights, layers = model.architecture, dict(model.weights), list(model.architecture.layers)
    for index, layer in enumerate(layers):
        factors = torch.full((architecture.num_heads,), architecture.head_dim**-0.5, dtype=torch.float64)
        if layer.attention == "softmax-temperature":
            name = f"layers.{index}.attention.temperature.weight"
            temperatures = weights[name]  # heads x context
            if (temperatures == temperatures[:, :1]).all():
                factors = factors / weights.pop(name)[:, 0]
                layers[index] = replace(layer, attention="softmax")
        packed = f"layers.{index}.attention.{'qk' if architecture.block == 'sas' else 'qkv'}"
        rows = factors.repeat_interleave(architecture.head_dim)
        _scale_rows(weights, packed, rows)
    return Folded(replace(architecture, layers=tuple(layers), folded=True), weights)


def _scale_rows(weights: Weights, linear: str, factors: Tensor) -> None:
    """The first rows of a linear, times a factor each."""
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in weights:
            value = weights[name]
            padded = torch.cat((factors, factors.new_ones(len(value) - len(factors))))
            weights[name] = value * padded.view(-1, *[1] * (value.ndim - 1))


def _fold_norms(model: Folded) -> Folded:
    """W (gain * x + bias) + b as (W gain) x + (W bias + b); linears without biases get some."""
    architecture, weights = model.architecture, dict(model.weights)
    readers = dict(_norm_readers(architecture))
    if readers and not architecture.bias:
        linears = [node.name for node in lower(architecture, 1) if isinstance(node.op, ops.Linear)]
        weights |= {
            f"{name}.bias": torch.zeros(len(weights[f"{name}.weight"]), dtype=torch.float64) for name in linears
        }
        architecture = replace(architecture, bias=True)
    for norm, linears in readers.items():
        gain, bias = weights.pop(f"{norm}.weight"), weights.pop(f"{norm}.bias")
        for linear in linears:
            _change_input_basis(weights, linear, _Basis(torch.diag(gain), bias))
    return Folded(architecture, weights)


def _norm_readers(architecture: Architecture) -> Iterator[tuple[str, list[str]]]:
    """The norms that linears alone read, with those; a later layer of block `sas` has its norm read as values, too."""
    simplified = architecture.block == "sas"
    for index, layer in enumerate(architecture.layers):
        name = f"layers.{index}"
        if layer.norm1 == "layernorm" and (index == 0 or not simplified):
            linears = ["qk", "v"] if simplified else ["qkv"]
            yield f"{name}.norm1", [f"{name}.attention.{linear}" for linear in linears]
        if layer.norm2 == "layernorm":
            yield f"{name}.norm2", [_first_linear(index, layer)]


def _first_linear(index: int, layer: Layer) -> str:
    return f"layers.{index}.ffn.{'fused' if layer.ffn == 'fused' else 'up'}"


def _last_linear(index: int, layer: Layer) -> str:
    return f"layers.{index}.ffn.{'fused' if layer.ffn == 'fused' else 'down'}"
