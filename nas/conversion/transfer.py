"""Weights of one placement for another of the same dimensions, so that a trained model can be linearised.

What both have is kept: linears whatever the activation between them, norms, tables. What the target lacks (norms, a
removed attention or FFN) is dropped, and half of the heads are those that write most into the residual stream. A norm
that the target is to freeze starts with the gain and bias of a live one and normalises each row until its turn; of a
frozen one it stays frozen. A fused FFN starts as the product of the two linears, a temperature at 1, which is what the
source computes without one; scalars of a scaled residual, slopes and norms that the source lacks start as they would.
In a bilinear FFN an activation starts as what of it is odd, or, of one without a gate, as a square beside that.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import Node
from search_spaces.architecture import FROZEN_NORMS, Architecture, num_kv_heads
from search_spaces.deployed import LINEAR_FFNS
from search_spaces.lower import lower

HEADS = (
    ".attention.qkv",
    ".attention.q",
    ".attention.k",
    ".attention.v",
    ".attention.out",
)  # linears with a slice for every head
SAME = (
    "block", "num_layers", "num_heads", "num_kv_heads", "d_model", "head_dim", "vocab_size", "bias", "tied_embeddings",
    "rotary_base", "norm_epsilon", "folded",
)  # fmt: skip
ODD_PART = 0.5  # of x that GELU(x), SiLU(x) and ReLU(x) have but for an even function of it


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
            opens = _opens_gate(source, target, node)
            value = (_opened if opens else _value)(node, suffix, weights)
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
    """The slices of a linear for the heads that the target keeps, with all heads of a key head, in their order."""
    assert isinstance(node.layer, int)
    theirs, ours = (num_kv_heads(model, model.layers[node.layer]) for model in (source, target))
    if ours >= theirs:
        return value
    layer, _, linear = node.name.rpartition(".attention.")
    kept = _strengths(source, layer, theirs, weights).topk(ours).indices.sort().values
    if linear == "out":
        return value.view(len(value), theirs, -1)[:, kept].flatten(1) if suffix == "weight" else value
    parts = torch.split(value, _widths(source, theirs)) if linear == "qkv" else [value]
    return torch.cat([part.view(theirs, -1, *part.shape[1:])[kept].flatten(0, 1) for part in parts])


def _widths(source: Architecture, key_heads: int) -> list[int]:
    """Rows of queries, keys and values in the packed linear of a layer with so many key heads."""
    heads = key_heads * source.num_heads // (source.num_kv_heads or source.num_heads)
    return [heads * source.head_dim, key_heads * source.head_dim, key_heads * source.head_dim]


def _strengths(source: Architecture, layer: str, key_heads: int, weights: Mapping[str, Tensor]) -> Tensor:
    """By key head, the squared Frobenius norm of what takes a normalised row to what it writes: O V diag(gain)."""
    attention = f"{layer}.attention"
    if f"{attention}.v.weight" in weights:
        values = weights[f"{attention}.v.weight"].double()
    else:
        values = torch.split(weights[f"{attention}.qkv.weight"].double(), _widths(source, key_heads))[2]
    out = weights[f"{attention}.out.weight"].double()
    gain = weights.get(f"{layer}.norm1.weight", torch.ones(values.shape[1])).double()
    values = (values * gain).view(key_heads, source.head_dim, -1)  # key heads x head_dim x d
    read = out.view(len(out), key_heads, -1, source.head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    return (read @ values).square().sum(dim=(1, 2))


def _opens_gate(source: Architecture, target: Architecture, node: Node) -> bool:
    """Whether a node is the gate of a bilinear FFN where the source has an activation."""
    if not isinstance(node.layer, int) or not node.name.endswith(".ffn.gate"):
        return False
    theirs = source.layers[node.layer].ffn
    return target.layers[node.layer].ffn == "bilinear" and theirs not in ("bilinear", "none", *LINEAR_FFNS)


def _opened(node: Node, suffix: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Half of the gate; without one, half of x + 1, where x is what the linear before the activation gives."""
    ffn = node.name.removesuffix(".gate")
    linear = f"{ffn}.gate" if f"{ffn}.gate.weight" in weights else f"{ffn}.up"
    constant = 0.0 if linear.endswith(".gate") else ODD_PART
    if suffix == "bias":
        weight = weights[f"{linear}.weight"]
        return ODD_PART * weights.get(f"{linear}.bias", weight.new_zeros(len(weight))) + constant
    return ODD_PART * weights[f"{linear}.{suffix}"]


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
