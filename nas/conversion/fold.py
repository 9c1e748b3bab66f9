"""Fold a trained model for deployment: compute the same logits with fewer operations.

`search_spaces.deployed` says what exact algebra removes from an architecture; `fold` changes the weights to match.
Weights have the names and shapes of `nas.model.weights.deployed_weights`; the arithmetic is in double precision.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from costmodel import ops
from costmodel.errors import UserError
from nas.conversion.change_of_basis import (
    Weights,
    add_constant,
    change_input,
    change_output,
    ffn_writer,
    inner_norm_linears,
    rebase,
    scale_rows,
    stream_readers,
    stream_writers,
)
from search_spaces.architecture import EPSILONS, Architecture, has_bias, num_heads
from search_spaces.deployed import (
    UNSCALED,
    Region,
    deployed_inner,
    deployed_layer,
    deploys_biases,
    folds_final_norm,
    joined,
)
from search_spaces.forms import FROZEN_NORMS, Norm
from search_spaces.inner import queries
from search_spaces.lower import lower

MAX_CONDITION = 1e8  # of the bases of the stream: half of the digits of double precision are left


class Folded(NamedTuple):
    """A folded architecture with its weights.

    weights: by `<node>.<suffix>`. condition: condition number of the bases of the residual stream (see `rebase`); 1 if
        no basis was changed.
    left: parts that stay unfolded only because of these weights: for each, a text with the node and the reason.
    """

    architecture: Architecture
    weights: Weights
    condition: float
    left: tuple[str, ...]


def fold(
    architecture: Architecture,
    weights: Mapping[str, Tensor],
    *,
    max_condition: float = MAX_CONDITION,
    dtype: torch.dtype = torch.float32,
) -> Folded:
    """Return a trained model in which all that can be is folded. Raises UserError if the model is folded already.

    weights: by `<node>.<suffix>`; not changed. max_condition: limit of the condition number (see `rebase`); linear FFNs
        and betas that would exceed it are left unfolded. dtype: type of the returned weights.
    """
    if architecture.folded:
        raise UserError("only a model that is not folded yet can be folded, but got one with `folded: true`.")
    new = {name: value.double() for name, value in weights.items()}
    if architecture.tied_embeddings:
        new["logits.weight"] = new["embed.weight"]
    model = _fold_scales(_fuse(_fold_inner_norms(_with_biases(architecture, new), new), new), new)
    model = _fold_final_norm(model, new)
    for norm, kind, linears in stream_readers(model):  # without linears, the output is used as values
        if kind != "none" and linears:  # W (gain (x - mean x) + bias) + b goes into linears of x or of normalised x
            matrix, shift = _taken_up(new, norm, kind)
            for linear in linears:
                change_input(new, linear, matrix, shift)
    layers, condition, left = rebase(model, new, max_condition)
    model = _fold_score_factors(replace(model, layers=layers), new)
    folded, new = _renumbered(replace(model, tied_embeddings=False, folded=True), new)
    return Folded(folded, {name: value.to(dtype).contiguous() for name, value in new.items()}, condition, left)


def at_dimensions(folded: Architecture, priced: Architecture) -> Architecture:
    """Return `folded` with the dimensions and norm epsilons of `priced`, for which costs are computed, unscaled."""
    dimensions = ("num_heads", "num_kv_heads", "head_size", "d_model", "d_ff", "vocab_size", "context", *EPSILONS)
    return replace(folded, inner_scales=(), **{name: getattr(priced, name) for name in dimensions})


def _fold_inner_norms(architecture: Architecture, weights: Weights) -> Architecture:
    """Fold the gains of frozen norms behind linears into the rows of these linears."""
    for norm, kind, linear in inner_norm_linears(architecture):
        if kind in FROZEN_NORMS:
            scale_rows(weights, linear, weights.pop(f"{norm}.weight"))
    layers = (
        replace(layer, inner1=deployed_inner(layer.inner1), inner2=deployed_inner(layer.inner2))
        for layer in architecture.layers
    )
    return replace(architecture, layers=tuple(layers))


def _fuse(architecture: Architecture, weights: Weights) -> Architecture:
    """Replace down @ (up @ x + up_bias) + down_bias by one linear."""
    layers = list(architecture.layers)
    for index, layer in enumerate(layers):
        if layer.ffn == "identity":
            ffn = f"layers.{index}.ffn"
            up, down = weights.pop(f"{ffn}.up.weight"), weights.pop(f"{ffn}.down.weight")
            weights[f"{ffn}.fused.weight"] = down @ up
            if has_bias(architecture, layer, "ffn.fused"):
                up_bias, down_bias = weights.pop(f"{ffn}.up.bias"), weights.pop(f"{ffn}.down.bias")
                weights[f"{ffn}.fused.bias"] = down @ up_bias + down_bias
            layers[index] = replace(layer, ffn="fused")
    return replace(architecture, layers=tuple(layers))


def _fold_scales(architecture: Architecture, weights: Weights) -> Architecture:
    """Fold the scales of embeddings, residual additions and logits, and alphas, into the linears before them."""
    factors = {"embed": architecture.embedding_scale, "logits": architecture.logit_scale}
    for name in stream_writers(architecture, architecture.num_layers):
        if name not in architecture.block_facts.tables:
            factors[name] = architecture.residual_scale
    for name, factor in factors.items():
        if factor != 1:
            change_output(weights, name, torch.tensor(factor, dtype=torch.float64))
    for index, layer in enumerate(architecture.layers):
        if layer.stabiliser == "scaled":
            alpha = f"layers.{index}.ffn.residual.alpha"
            change_output(weights, ffn_writer(architecture, index), 1 / weights[alpha])
            weights[alpha] = torch.ones_like(weights[alpha])
    return replace(architecture, **{**UNSCALED, "score_scale": architecture.score_scale})


def _fold_score_factors(architecture: Architecture, weights: Weights) -> Architecture:
    """Fold 1/sqrt(head_dim) and temperatures that do not depend on the position into the rows of the queries."""
    layers = list(architecture.layers)
    for index, layer in enumerate(layers):
        if layer.attention == "none":
            continue
        heads, reader = num_heads(architecture, layer), queries(architecture, layer)
        shares_gain = reader.endswith("_norm") and architecture.block_facts.query_key_norm == "head"
        factors = torch.full((heads,), architecture.score_factor, dtype=torch.float64)
        if layer.attention == "softmax-temperature":
            name = f"layers.{index}.attention.temperature.weight"
            temperatures = weights[name]  # heads x context
            if (temperatures == temperatures[:, :1]).all() and not shares_gain:
                factors = factors / weights.pop(name)[:, 0]
                layers[index] = replace(layer, attention="softmax")
        factors = factors[:1] if shares_gain else factors
        scale_rows(weights, f"layers.{index}.{reader}", factors.repeat_interleave(architecture.head_dim))
    return replace(architecture, layers=tuple(layers), score_scale=None)


def _renumbered(architecture: Architecture, weights: Weights) -> tuple[Architecture, Weights]:
    """Drop frozen norms and empty layers (see `joined`), and renumber the other layers."""
    nowhere, block = Region(ahead=False, behind=False), architecture.block_facts
    layers = [
        deployed_layer(architecture, layer, nowhere, keeps_norm1=block.passes_values(index))
        for index, layer in enumerate(architecture.layers)
    ]

    def renamed(name: str) -> str:
        layer, _, rest = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers."):
            return name  # below: the last of the joined layers up to this one
        return f"layers.{joined(architecture, layers[: int(layer) + 1]).num_layers - 1}.{rest}"

    scales = tuple((renamed(norm), scale) for norm, scale in architecture.inner_scales)
    new = {renamed(name): value for name, value in weights.items()}
    return replace(joined(architecture, layers), inner_scales=scales), new


def _fold_final_norm(architecture: Architecture, weights: Weights) -> Architecture:
    """Fold a frozen final norm into the vocabulary projection, which has no bias.

    The bias of a centred norm comes from the mean of the stream, which every reader subtracts: everything added to the
    stream is centred, and at the end its mean is set to 1.
    """
    kind = architecture.final_norm
    if kind == "none" or not folds_final_norm(architecture):
        return architecture
    matrix, bias = _taken_up(weights, "final_norm", kind)
    if kind == "frozen-layernorm":
        centring = _centring(architecture.d_model)
        for name in stream_writers(architecture, architecture.num_layers):  # betas of kept FFNs keep a mean of 0
            if name in architecture.block_facts.tables:
                weights[f"{name}.weight"] = weights[f"{name}.weight"] @ centring
            else:
                change_output(weights, name, centring)
        add_constant(architecture, weights, architecture.num_layers, torch.ones_like(bias))
        matrix = matrix + bias[:, None] / len(bias)
    weights["logits.weight"] = weights["logits.weight"] @ matrix
    return replace(architecture, final_norm="none", tied_embeddings=False)


def _taken_up(weights: Weights, norm: str, kind: Norm) -> tuple[Tensor, Tensor]:
    """Return the linear part of a norm as matrix and shift, and remove its weights."""
    gain = weights.pop(f"{norm}.weight")
    shift = weights.pop(f"{norm}.bias", torch.zeros_like(gain))
    matrix = torch.diag(gain)
    return (matrix @ _centring(len(gain)) if kind == "frozen-layernorm" else matrix), shift


def _centring(features: int) -> Tensor:
    """Return the matrix that maps x to x - mean x."""
    return torch.eye(features, dtype=torch.float64) - 1 / features


def _with_biases(architecture: Architecture, weights: Weights) -> Architecture:
    """Add biases of 0 to a model without biases if folding may need them."""
    if architecture.bias or not deploys_biases(architecture):
        return architecture
    for node in lower(architecture, 1):
        if isinstance(node.op, ops.Linear) and not node.op.bias:
            weights[f"{node.name}.bias"] = torch.zeros(node.op.out_features, dtype=torch.float64)
    return replace(architecture, bias=True, biases=())
