"""Initialise one architecture (the target) with weights of another of the same dimensions (the source).

Linears that both have are copied, whatever the activation between them, unless a polynomial replaces that activation.
If a layer of the target has fewer heads, the heads that write most into the stream are kept. Queries are rescaled where
eighth powers replace the softmax (`query_scale`). A norm that training will freeze starts with the gain and bias of the
source's norm; a norm that is frozen in the source stays frozen. A fused FFN starts as the product of the two linears. A
polynomial gate starts as x / 2, the odd part of the source's activation, plus x^2 / 5 for the even part if the gate is
quadratic. If the source has no gate, (x^2 + x) / 2 replaces its activation of x.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import Node
from nas.model.mpc_friendly import query_scale
from search_spaces.architecture import EPSILONS, SCALES, Architecture, num_heads, num_kv_heads, softmax_form
from search_spaces.forms import FROZEN_NORMS, LINEAR_FFNS, POLYNOMIAL_GATES
from search_spaces.inner import inner_norms, queries
from search_spaces.lower import lower

# Nodes with a slice for every head; the first two only if a norm's gain has the width of all heads.
HEADS = tuple(f".attention.{name}" for name in ("q_norm", "k_norm", "qkv", "q", "k", "v", "out"))
SAME = (  # settings that source and target must share
    "block", "num_layers", "num_heads", "num_kv_heads", "d_model", "head_dim", "vocab_size", "bias", "biases",
    "tied_embeddings", "rotary_base", "rotary_features", "positions", "layer_positions", *EPSILONS, *SCALES,
    "inner_scales", "score_scale", "score_cap", "folded",
)  # fmt: skip
# Initial coefficients of a gate, constant first: GELU(x), SiLU(x) and ReLU(x) are x / 2 plus an even function, which is
# about x^2 / 5 for most inputs of SiLU.
GATED = (0.0, 0.5, 0.2)
UNGATED = (0.5, 0.5, 0.0)  # multiplied by x
FARTHEST_VERTEX = 32.0  # |x| of a squared gate's vertex; if larger, square and 1 nearly cancel, and digits are lost
NEAREST_ROOTS = 0.98  # largest c of c + b x + a x^2, as a share of b^2 / 4a, where the roots coincide
TINY = 1e-12


def transferred(source: Architecture, weights: Mapping[str, Tensor], target: Architecture) -> dict[str, Tensor]:
    """Return the initial weights of a model of `target`, as `load_deployed` takes them.

    weights: the source's, in the form of `deployed_weights`. For norms that training freezes, the result also has
        `<norm>.frozen`: 1 if the source's is frozen, else 0. A weight that is not in the result keeps its usual initial
        value. Raises UserError if a setting in SAME differs, or the target has a longer context, weights of other
        shapes or linears that the source lacks.
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
            degree = _opened_degree(source, target, node)
            value = _value(node, suffix, weights) if degree is None else _opened(node, suffix, weights, degree)
            if value is None:
                continue
            is_frozen = isinstance(node.op, ops.FrozenNorm)
            if is_frozen and node.name.endswith(HEADS[:2]):  # heads may share one gain
                assert isinstance(node.layer, int)
                count = num_heads if node.name.endswith(HEADS[0]) else num_kv_heads
                value = value.repeat(count(source, source.layers[node.layer]) * source.head_dim // len(value))
            by_head = is_frozen or target.block_facts.query_key_norm == "width"
            if node.name.endswith(HEADS[0 if by_head else 2 :]):
                value = _strongest_heads(source, target, node, suffix, value, weights)
            at = node.layer
            if isinstance(at, int) and node.name == f"layers.{at}.{queries(target, target.layers[at])}":
                ours, theirs = (query_scale(softmax_form(model, model.layers[at])) for model in (target, source))
                num_rows = num_heads(target, target.layers[at]) * target.head_dim
                value = value if ours == theirs else torch.cat((value[:num_rows] * (ours / theirs), value[num_rows:]))
            if value.shape != shape:
                raise UserError(f"`{node.name}.{suffix}` must have the shape {shape}, but has {tuple(value.shape)}.")
            started[f"{node.name}.{suffix}"] = value
        if isinstance(node.op, ops.FrozenNorm) and f"{node.name}.weight" in started:
            started[f"{node.name}.frozen"] = torch.tensor(float(_is_frozen(source, node)))
    return started


def _strongest_heads(
    source: Architecture, target: Architecture, node: Node, suffix: str, value: Tensor, weights: Mapping[str, Tensor]
) -> Tensor:
    """Return the slices of a weight for the heads that the target keeps; query heads stay with their key head."""
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
    """Return the rows of queries, keys and values in the packed linear of a layer with this many key heads."""
    heads = key_heads * source.num_heads // (source.num_kv_heads or source.num_heads)
    return [heads * source.head_dim, key_heads * source.head_dim, key_heads * source.head_dim]


def _strengths(source: Architecture, layer: str, key_heads: int, weights: Mapping[str, Tensor]) -> Tensor:
    """Return ||O V diag(gain)||_F^2 by key head: how strongly it maps a normalised row of the stream to the stream."""
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


def _opened_degree(source: Architecture, target: Architecture, node: Node) -> int | None:
    """Return the degree of the polynomial if an FFN replaces an activation by one and the node is its gate or `up`."""
    if not isinstance(node.layer, int) or not node.name.endswith((".ffn.gate", ".ffn.up")):
        return None
    ours, theirs = target.layers[node.layer].ffn, source.layers[node.layer].ffn
    return None if theirs in (ours, "none", *LINEAR_FFNS) else POLYNOMIAL_GATES.get(ours)


def _opened(node: Node, suffix: str, weights: Mapping[str, Tensor], degree: int) -> Tensor:
    """Return the weight of a gate or `up` that computes the polynomial; a missing gate starts as `up`."""
    ffn, _, name = node.name.rpartition(".")
    is_gated = f"{ffn}.gate.weight" in weights
    polynomial = torch.tensor((GATED if is_gated else UNGATED)[: degree + 1], dtype=torch.float64)
    slope, shift, scale = (float(value) for value in gate_of(tuple(polynomial[:, None])))
    linear = f"{ffn}.{'gate' if is_gated and name == 'gate' else 'up'}"
    weight = weights[f"{linear}.weight"]
    value = weights.get(f"{linear}.{suffix}", weight.new_zeros(len(weight)))
    if name == "up":
        return scale * value
    return slope * value + (shift if suffix == "bias" else 0.0)


def gate_of(polynomial: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, q and s, each one number per channel, with which a gate computes a polynomial of x.

    `c + b x` is `s (p x + q)` with s = 1, and `c + b x + a x^2` is `s ((p x + q)^2 - 1)`. polynomial: the coefficients
    c, b and maybe a, each one number per channel. The second form needs two real roots, which coincide at c = b^2 / 4a:
    c is limited to `NEAREST_ROOTS` times that. |a| is raised if the vertex is beyond |x| = `FARTHEST_VERTEX`.
    """
    if len(polynomial) == 2:
        constant, slope = polynomial
        return slope, constant, torch.ones_like(slope)
    constant, slope, square = polynomial
    slope = torch.where(slope == 0, TINY, slope)  # the channel is always 0
    least = slope.abs() / (2 * FARTHEST_VERTEX)
    square = torch.where(square.abs() < least, torch.where(square < 0, -least, least), square)
    vertex = slope / (2 * square)
    depth = square * vertex.square()  # of the vertex below the constant, with the sign of `square`
    scale = depth * (1 - (constant / depth).clamp(max=NEAREST_ROOTS))
    root = (square / scale).sqrt()
    return root, root * vertex, scale


def _is_frozen(source: Architecture, node: Node) -> bool:
    if not isinstance(node.layer, int):
        return source.final_norm in FROZEN_NORMS
    layer, place = source.layers[node.layer], node.name.removeprefix(f"layers.{node.layer}.")
    return (inner_norms(source, layer) | {"norm1": layer.norm1, "norm2": layer.norm2}).get(place) in FROZEN_NORMS


def _value(node: Node, suffix: str, weights: Mapping[str, Tensor]) -> Tensor | None:
    """Return one weight of the target; None for its usual initial value. Raises UserError for a missing linear."""
    name = f"{node.name}.{suffix}"
    if name in weights:
        value = weights[name]
        if isinstance(node.op, ops.PositionEmbedding):
            return value[: node.op.rows]
        return value[:, : node.op.keys] if isinstance(node.op, ops.Temperature) else value
    if isinstance(node.op, ops.Temperature):
        return torch.ones(node.op.weight_shapes[suffix])
    if not isinstance(node.op, ops.Linear) or (suffix == "bias" and f"{node.name}.weight" in weights):
        return None
    ffn = node.name.removesuffix(".fused")
    if ffn == node.name or f"{ffn}.up.weight" not in weights:
        raise UserError(
            f"the weights must hold {name!r}, but their placement has no such linear; give an ARCH that they fit."
        )
    product = weights[f"{ffn}.down.weight"].double() @ weights[f"{ffn}.up.{suffix}"].double()
    return (product if suffix == "weight" else product + weights[f"{ffn}.down.bias"].double()).float()
