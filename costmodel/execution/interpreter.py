"""Runs an `OpGraph`: what is priced is what is computed, in the clear or, by the same functions, under an engine.

What an op computes is in `execution.op_functions`; here are its arrays. Everything that an engine's client or server
computes in the clear before the run happens in `operands` and `inputs`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from costmodel import ops
from costmodel.errors import UserError
from costmodel.execution.op_functions import Array as Array
from costmodel.execution.op_functions import Weights as Weights
from costmodel.execution.op_functions import evaluate, numpy_library
from costmodel.ops import Node, Op, OpGraph


def execute(graph: OpGraph, weights: Weights, tokens: Array, caches: Mapping[str, Array] | None = None) -> Array:
    """The logits (projected tokens x vocab), in the clear and in double precision.

    Arguments and errors as for `values`.
    """
    return values(graph, weights, tokens, caches)[graph.nodes[-1].name]


def values(
    graph: OpGraph, weights: Weights, tokens: Array, caches: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """The outputs of all nodes by name, in the clear and in double precision.

    weights: by `<node>.<suffix>`, as deployed (a temperature is t, a linear weight is out_features x in_features).
    tokens: integer array of as many tokens as the graph was lowered for; of several sequences, all first tokens, then
        all second ones, in the order of the rows of logits.
    caches: the graph's inputs beside the tokens, by name, where it has any; see `kv_cache`.

    Raises UserError for a weight or cache that is missing or of another shape, tokens of another length or outside
    the vocabulary, or an op without a function.
    """
    library = numpy_library()
    known = inputs(graph, tokens, caches)
    for node in graph:
        known[node.name] = evaluate(node.op, library, operands(node, weights), *(known[name] for name in node.inputs))
    return known


def inputs(graph: OpGraph, tokens: Array, caches: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """What a graph reads, by name: the client's tokens, one-hot or as they are, and caches. Errors as for `values`."""
    found = {"tokens": encoded(graph, tokens)}
    for each in graph.inputs:
        if caches is None or each.name not in caches:
            raise UserError(f"`caches` must hold {each.name!r} of shape {each.shape}, but it is missing.")
        value = np.asarray(caches[each.name], dtype=np.float64)
        if value.shape != each.shape:
            raise UserError(f"cache {each.name!r} must have the shape {each.shape}, but has {value.shape}.")
        found[each.name] = value
    return found


def kv_cache(graph: OpGraph, past: Mapping[str, Array]) -> dict[str, Array]:
    """The caches of a graph of phase `decode`, from the `values` of a run of the same model over earlier tokens.

    Raises UserError if that run was over fewer tokens than the graph has cached.
    """
    found = {}
    for node in graph:
        if isinstance(node.op, ops.KeyValueCache) and node.op.past_len:
            cache, source = node.inputs
            if len(past[source]) < node.op.past_len:
                raise UserError(f"{cache!r} keeps {node.op.past_len} tokens, but the run had {len(past[source])}.")
            found[cache] = past[source][: node.op.past_len, -node.op.features :]
    return found


def encoded(graph: OpGraph, tokens: Array) -> Array:
    """tokens x vocab, one 1 per row; or the tokens themselves, where they are looked up."""
    op = next(node.op for node in graph if isinstance(node.op, ops.TokenEmbedding))
    tokens = np.asarray(tokens)
    if tokens.shape != (op.tokens,):
        raise UserError(f"`tokens` must be {op.tokens} integers, as the graph was lowered for, but got {tokens.shape}.")
    if tokens.min() < 0 or tokens.max() >= op.vocab:
        raise UserError(f"`tokens` must be from 0 to {op.vocab - 1}, but got {tokens.min()} to {tokens.max()}.")
    return tokens.astype(np.float64) if op.encoding == "lookup" else np.eye(op.vocab)[tokens]


# op type -> its weights' shapes by suffix to the node's name, a type without an entry has none; the suffixes and shapes
# are those of the deployed weights, and the tables of positions are as long as the op needs
WEIGHT_SHAPES: dict[type, Callable[[Any], dict[str, tuple[int, ...]]]] = {
    ops.TokenEmbedding: lambda op: {"weight": (op.vocab, op.features)},
    ops.PositionEmbedding: lambda op: {"weight": (op.past_len + op.rows // op.sequences, op.features)},
    ops.LayerNorm: lambda op: dict.fromkeys(("weight", "bias")[: op.affine + (op.affine and op.bias)], (op.features,)),
    ops.RmsNorm: lambda op: {"weight": (op.features,)} if op.affine else {},
    ops.FrozenNorm: lambda op: {"weight": (op.features,), **({"bias": (op.features,)} if op.centred else {})},
    ops.Linear: lambda op: {
        "weight": (op.out_features, op.in_features),
        **({"bias": (op.out_features,)} if op.bias else {}),
    },
    ops.Temperature: lambda op: {"weight": (op.heads // op.sequences, op.keys)},
    ops.ShapedAttention: lambda op: dict.fromkeys(("identity", "softmax", "uniform"), (op.heads // op.sequences,)),
    ops.LeakyRelu: lambda op: {"slope": (1,)},
    ops.ScaledAdd: lambda op: {"alpha": (), "beta": ()},
    ops.VocabProjection: lambda op: {"weight": (op.whole or op.vocab, op.features)},
}
# op type -> the shapes of what it reads from other ops. A rotation reads heads of any width; the least is given here.
INPUTS: dict[type, Callable[[Any], tuple[tuple[int, ...], ...]]] = {
    ops.TokenEmbedding: lambda op: ((op.tokens,) if op.encoding == "lookup" else (op.tokens, op.vocab),),
    ops.PositionEmbedding: lambda op: ((op.rows, op.features),),
    ops.LayerNorm: lambda op: ((op.rows, op.features),),
    ops.RmsNorm: lambda op: ((op.rows, op.features),),
    ops.FrozenNorm: lambda op: ((op.rows, op.features),),
    ops.Linear: lambda op: ((op.rows, op.in_features),),
    ops.PackHeads: lambda op: ((op.rows, op.query_features), *((op.rows, op.key_features),) * 2),
    ops.Rotary: lambda op: ((op.rows, (op.heads + 2 * (op.key_heads or op.heads)) * op.rotary_dim),),
    ops.RepeatHeads: lambda op: ((op.rows, (op.heads + 2 * op.key_heads) * op.head_dim),),
    ops.KeyValueCache: lambda op: (
        *([(op.past_len, op.features)] if op.past_len else []),
        (op.rows, op.features),
    ),
    ops.AttentionScores: lambda op: (
        (op.queries * op.sequences, 3 * op.heads // op.sequences * op.head_dim),
        *([(op.keys * op.sequences, 2 * op.heads // op.sequences * op.head_dim)] if op.queries < op.keys else []),
    ),
    ops.Temperature: lambda op: ((op.heads, op.queries, op.keys),),
    ops.Softmax: lambda op: ((op.heads, op.queries, op.keys),),
    ops.ShapedAttention: lambda op: ((op.heads, op.queries, op.keys),),
    ops.AttentionMix: lambda op: (
        (op.heads, op.queries, op.keys),
        (op.keys * op.sequences, op.heads // op.sequences * op.head_dim),
    ),
    ops.Gelu: lambda op: ((op.rows, op.features),),
    ops.Relu: lambda op: ((op.rows, op.features),),
    ops.LeakyRelu: lambda op: ((op.rows, op.features),),
    ops.Square: lambda op: ((op.rows, op.features),),
    ops.Silu: lambda op: ((op.rows, op.features),),
    ops.Sigmoid: lambda op: ((op.rows, op.features),),
    ops.Tanh: lambda op: ((op.rows, op.features),),
    ops.Multiply: lambda op: ((op.rows, op.features),) * 2,
    ops.Scale: lambda op: ((op.rows, op.features),),
    ops.Add: lambda op: ((op.rows, op.features),) * 2,
    ops.ScaledAdd: lambda op: ((op.rows, op.features),) * 2,
    ops.TakeRows: lambda op: ((op.rows, op.features),),
    ops.JoinRows: lambda op: tuple(
        (min(op.part, op.rows - first), op.features) for first in range(0, op.rows, op.part)
    ),
    ops.JoinColumns: lambda op: tuple(
        (op.rows, min(op.part, op.features - first)) for first in range(0, op.features, op.part)
    ),
    ops.VocabProjection: lambda op: ((op.rows, op.features),),
}
# Tables that are learned for the whole context and read for some of its tokens: the axis of tokens, and which of them.
READ_TOKENS: dict[type, tuple[int, Callable[[Any], range]]] = {
    ops.PositionEmbedding: (0, lambda op: range(op.past_len, op.past_len + op.rows // op.sequences)),
    ops.Temperature: (1, lambda op: range(op.keys - op.queries, op.keys)),
}
# Tables of which an op may read a part, and which of its rows.
READ_ROWS: dict[type, Callable[[Any], slice]] = {
    ops.VocabProjection: lambda op: slice(op.first, op.first + op.vocab),
}
# Operands that the owner of the weights inverts before the run, since a division is dear where a product is not.
INVERTED: frozenset[tuple[type, str]] = frozenset({(ops.Temperature, "weight"), (ops.ScaledAdd, "alpha")})
# Matrices that are turned before the run: an engine that keeps a weight's mask keeps that of an array, not of a view.
TRANSPOSED: frozenset[tuple[type, str]] = frozenset({(ops.Linear, "weight"), (ops.VocabProjection, "weight")})
# Ops whose learned scalars are public, as `costmodel.ops` says of them.
PUBLIC: frozenset[type] = frozenset({ops.Temperature, ops.ShapedAttention})


def weight_shapes(op: Op) -> dict[str, tuple[int, ...]]:
    """The shapes of an op's weights by suffix; of a position or temperature table, up to the last row the op reads."""
    return WEIGHT_SHAPES[type(op)](op) if type(op) in WEIGHT_SHAPES else {}


def model_weights(graph: OpGraph) -> dict[str, tuple[Op, str]]:
    """Every weight of a graph's model by name: an op that reads all of it that any does, and its suffix there."""
    found: dict[str, tuple[Op, str]] = {}
    for node in graph:
        for suffix, shape in weight_shapes(node.op).items():
            name = f"{node.model_name}.{suffix}"
            if name not in found or shape > weight_shapes(found[name][0])[suffix]:
                found[name] = node.op, suffix
    return found


def operands(node: Node, weights: Weights) -> dict[str, Array]:
    """A node's operands by suffix, as its function takes them: cut to its tokens, and turned or inverted.

    Raises UserError for a weight that is missing or of another shape.
    """
    found = {}
    for suffix, shape in weight_shapes(node.op).items():
        name = f"{node.model_name}.{suffix}"
        if name not in weights:
            raise UserError(f"`weights` must hold {name!r} of shape {shape}, but it is missing.")
        value = np.asarray(weights[name], dtype=np.float64)
        axis, tokens = READ_TOKENS.get(type(node.op), (0, None))
        if tokens is not None and value.ndim == len(shape):  # whatever is beyond the op's tokens is not read
            value = value.take(range(min(shape[axis], value.shape[axis])), axis)
        if value.shape != shape:
            raise UserError(f"weight {name!r} must have the shape {shape}, but has {value.shape}.")
        if tokens is not None:
            value = value.take(tokens(node.op), axis)
        if type(node.op) in READ_ROWS:
            value = value[READ_ROWS[type(node.op)](node.op)]
        value = value.T if (type(node.op), suffix) in TRANSPOSED else value
        found[suffix] = 1 / value if (type(node.op), suffix) in INVERTED else value
    return found
