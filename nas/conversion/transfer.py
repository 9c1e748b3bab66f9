"""Weights of one placement for another of the same dimensions, so that a trained model can be linearised.

What both have is kept: linears whatever the activation between them, norms, tables. What the target lacks (norms, a
removed attention or FFN) is dropped, and half of the heads are those that write most into the residual stream. A norm
that the target is to freeze starts with the gain and bias of a live one and normalises each row until its turn; of a
frozen one it stays frozen. A fused FFN starts as the product of the two linears, a temperature at 1, which is what the
source computes without one; scalars of a scaled residual, slopes and norms that the source lacks start as they would.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import Node
from search_spaces.architecture import FROZEN_NORMS, Architecture, num_heads
from search_spaces.lower import lower

HEADS = (".qkv", ".out")  # linears with a slice for every head
SAME = ("block", "num_layers", "num_heads", "d_model", "vocab_size", "bias", "tied_embeddings", "folded")


def transferred(source: Architecture, weights: Mapping[str, Tensor], target: Architecture) -> dict[str, Tensor]:
    """The weights that a model of `target` starts with, by node; what is not in it keeps its own start.

    Raises UserError if dimensions differ, the target's context is longer, or it has linears that the source lacks.
    """
    for name in SAME:
        theirs, ours = getattr(source, name), getattr(target, name)
        if theirs != ours:
            raise UserError(f"`{name}` must be that of the weights, {theirs!r}, but is {ours!r}; use their dimensions.")
    if target.context > source.context:
        raise UserError(f"`context` must be at most that of the weights, {source.context}, but is {target.context}.")
    started: dict[str, Tensor] = {}
    for node in lower(target, target.context):
        for suffix, shape in node.op.weight_shapes.items():
            value = _value(node, suffix, weights)
            if value is not None and node.name.endswith(HEADS):
                value = _strongest_heads(source, target, node, suffix, value, weights)
            if value is not None and value.shape != shape:
                raise UserError(f"`{node.name}.{suffix}` must have the shape {shape}, but has {tuple(value.shape)}.")
            if value is not None:
                started[f"{node.name}.{suffix}"] = value
        if isinstance(node.op, ops.FrozenNorm) and f"{node.name}.weight" in started:
            started[f"{node.name}.frozen"] = torch.tensor(float(_is_frozen(source, node)))
    return started


def _strongest_heads(
    source: Architecture, target: Architecture, node: Node, suffix: str, value: Tensor, weights: Mapping[str, Tensor]
) -> Tensor:
    """The slices of a packed or an output linear for the heads that the target keeps, in their order."""
    assert isinstance(node.layer, int)
    theirs, ours = (num_heads(model, model.layers[node.layer]) for model in (source, target))
    if ours >= theirs:
        return value
    layer, _, linear = node.name.rpartition(".attention.")
    kept = _strengths(layer, theirs, weights).topk(ours).indices.sort().values
    if linear == "qkv":
        return value.view(3, theirs, source.head_dim, -1)[:, kept].reshape(-1, *value.shape[1:])
    return value.view(-1, theirs, source.head_dim)[:, kept].flatten(1) if suffix == "weight" else value


def _strengths(layer: str, heads: int, weights: Mapping[str, Tensor]) -> Tensor:
    """By head, the squared Frobenius norm of what takes a normalised row to what it writes: O V diag(gain)."""
    packed, out = (weights[f"{layer}.attention.{linear}.weight"].double() for linear in ("qkv", "out"))
    gain = weights.get(f"{layer}.norm1.weight", torch.ones(packed.shape[1])).double()
    values = packed.view(3, heads, -1, packed.shape[1])[2] * gain  # heads x head_dim x d
    written = out.view(len(out), heads, -1).transpose(0, 1) @ values  # heads x d x d
    return written.square().sum(dim=(1, 2))


def _is_frozen(source: Architecture, node: Node) -> bool:
    """Whether the source's norm in the place of a node is frozen."""
    place = source.final_norm if node.layer == "head" else getattr(source.layers[int(node.layer)], node.name[-5:])
    return place in FROZEN_NORMS


def _value(node: Node, suffix: str, weights: Mapping[str, Tensor]) -> Tensor | None:
    """One weight of the target; None if it keeps its own start. Raises UserError for a linear that is not there."""
    name = f"{node.name}.{suffix}"
    if name in weights:
        value = weights[name]
        if isinstance(node.op, ops.PositionEmbedding):
            return value[: node.op.rows]
        return value[:, : node.op.keys] if isinstance(node.op, ops.Temperature) else value
    if isinstance(node.op, ops.Temperature):
        return torch.ones(node.op.weight_shapes[suffix])
    if not isinstance(node.op, ops.Linear):
        return None
    ffn = node.name.removesuffix(".fused")
    if ffn == node.name or f"{ffn}.up.weight" not in weights:
        raise UserError(
            f"the weights must hold {name!r}, but their placement has no such linear; give an ARCH that they fit."
        )
    return _product(ffn, suffix, weights)


def _product(ffn: str, suffix: str, weights: Mapping[str, Tensor]) -> Tensor:
    """down @ (up @ x + up_bias) + down_bias: its matrix or its bias."""
    down = weights[f"{ffn}.down.weight"].double()
    if suffix == "weight":
        return (down @ weights[f"{ffn}.up.weight"].double()).float()
    return (down @ weights[f"{ffn}.up.bias"].double() + weights[f"{ffn}.down.bias"].double()).float()
