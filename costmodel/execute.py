"""Runs an `OpGraph`: what is priced is what is computed, in the clear or, by the same functions, under an engine.

A node's function takes the array library as an argument: numpy computes at once, jax.numpy can be traced by an
engine. Shapes: activations are rows x features; scores and attention weights are heads x queries x keys; a packed
projection is rows x (parts x heads x head_dim), its parts queries, keys and, where there are three, values.

Everything that an engine's client or server computes in the clear before the run happens in `operands` and `one_hot`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from costmodel import ops
from costmodel.ops import Node, Op, OpGraph

Array: TypeAlias = Any  # numpy.ndarray, or whatever the array library at hand traces
Weights: TypeAlias = Mapping[str, Array]

LAYERNORM_EPSILON = 1e-5  # Radford et al. 2019, GPT-2, and torch's default
ROTARY_BASE = 10_000.0  # Su et al. 2021, arXiv 2104.09864, and Pythia's configs
MASKED_SCORE = -30.0  # exp(-30) = 9e-14 counts as 0; -1e4 and below overflow fixed point with 18 fraction bits
GELU_TANH_CUBIC = 0.044715  # Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The array functions a node needs: `numpy` is its name for everything but the functions numpy lacks."""

    numpy: Any
    erf: Callable[[Array], Array]
    rsqrt: Callable[[Array], Array]


def numpy_library() -> Library:
    """Everything in the clear, at once."""
    from scipy.special import erf  # only an exact GELU needs it

    return Library(numpy=np, erf=erf, rsqrt=lambda source: 1 / np.sqrt(source))


def execute(graph: OpGraph, weights: Weights, tokens: Array) -> Array:
    """The logits (tokens x vocab) of one sequence, in the clear and in double precision.

    weights: by `<node>.<suffix>`, as deployed (a temperature is t, a linear weight is out_features x in_features).
    tokens: integer array of as many tokens as the graph was lowered for.

    Raises ValueError for a weight that is missing or of another shape, tokens of another length or outside the
    vocabulary, or an op without a function.
    """
    library = numpy_library()
    values = {"tokens": one_hot(graph, tokens)}
    for node in graph:
        values[node.name] = evaluate(node.op, library, operands(node, weights), *(values[name] for name in node.inputs))
    return values[graph.nodes[-1].name]


def evaluate(op: Op, library: Library, own: Weights, *inputs: Array) -> Array:
    """The output of one op from its operands by suffix and its inputs. Raises ValueError for an op of no function."""
    if type(op) not in FUNCTIONS:
        raise ValueError(f"no function runs {type(op).__name__}; add one to FUNCTIONS.")
    return FUNCTIONS[type(op)](op, library, own, *inputs)


def one_hot(graph: OpGraph, tokens: Array) -> Array:
    """The client's input: tokens x vocab, one 1 per row. Raises ValueError for tokens the graph cannot take."""
    op = next(node.op for node in graph if isinstance(node.op, ops.TokenEmbedding))
    tokens = np.asarray(tokens)
    if tokens.shape != (op.tokens,):
        raise ValueError(
            f"`tokens` must be {op.tokens} integers, as the graph was lowered for, but got {tokens.shape}."
        )
    if tokens.min() < 0 or tokens.max() >= op.vocab:
        raise ValueError(f"`tokens` must be from 0 to {op.vocab - 1}, but got {tokens.min()} to {tokens.max()}.")
    return np.eye(op.vocab)[tokens]


# op type -> its weights' shapes by suffix; the suffixes and shapes are those of the deployed weights
SHAPES: dict[type, Callable[[Any], dict[str, tuple[int, ...]]]] = {
    ops.TokenEmbedding: lambda op: {"weight": (op.vocab, op.features)},
    ops.PositionEmbedding: lambda op: {"weight": (op.rows, op.features)},
    ops.LayerNorm: lambda op: {"weight": (op.features,), "bias": (op.features,)},
    ops.Linear: lambda op: {
        "weight": (op.out_features, op.in_features),
        **({"bias": (op.out_features,)} if op.bias else {}),
    },
    ops.Temperature: lambda op: {"weight": (op.heads, op.queries)},
    ops.ShapedAttention: lambda op: {"identity": (op.heads,), "softmax": (op.heads,), "uniform": (op.heads,)},
    ops.LeakyRelu: lambda op: {"slope": (1,)},
    ops.ScaledAdd: lambda op: {"alpha": (), "beta": ()},
    ops.VocabProjection: lambda op: {"weight": (op.vocab, op.features)},
}
# op type -> the shapes of what it reads from other ops. A rotation reads heads of any width; the least is given here.
INPUTS: dict[type, Callable[[Any], tuple[tuple[int, ...], ...]]] = {
    ops.TokenEmbedding: lambda op: ((op.tokens, op.vocab),),
    ops.PositionEmbedding: lambda op: ((op.rows, op.features),),
    ops.LayerNorm: lambda op: ((op.rows, op.features),),
    ops.Linear: lambda op: ((op.rows, op.in_features),),
    ops.Rotary: lambda op: ((op.rows, 3 * op.heads * op.rotary_dim),),
    ops.AttentionScores: lambda op: ((op.queries, 3 * op.heads * op.head_dim),),
    ops.Temperature: lambda op: ((op.heads, op.queries, op.keys),),
    ops.Softmax: lambda op: ((op.heads, op.queries, op.keys),),
    ops.ShapedAttention: lambda op: ((op.heads, op.queries, op.keys),),
    ops.AttentionMix: lambda op: ((op.heads, op.queries, op.keys), (op.keys, op.heads * op.head_dim)),
    ops.Gelu: lambda op: ((op.rows, op.features),),
    ops.Relu: lambda op: ((op.rows, op.features),),
    ops.LeakyRelu: lambda op: ((op.rows, op.features),),
    ops.Add: lambda op: ((op.rows, op.features),) * 2,
    ops.ScaledAdd: lambda op: ((op.rows, op.features),) * 2,
    ops.VocabProjection: lambda op: ((op.rows, op.features),),
}
# Tables that are learned for the whole context and read for one prompt: the axis that is cut to the op's rows.
CUT_AXIS: dict[type, int] = {ops.PositionEmbedding: 0, ops.Temperature: 1}
# Operands that the owner of the weights inverts before the run, since a division is dear where a product is not.
INVERTED: frozenset[tuple[type, str]] = frozenset({(ops.Temperature, "weight"), (ops.ScaledAdd, "alpha")})
# Ops whose learned scalars are public, as `costmodel.ops` says of them.
PUBLIC: frozenset[type] = frozenset({ops.Temperature, ops.ShapedAttention})


def shapes(op: Op) -> dict[str, tuple[int, ...]]:
    """The shapes of an op's weights by suffix."""
    return SHAPES[type(op)](op) if type(op) in SHAPES else {}


def operands(node: Node, weights: Weights) -> dict[str, Array]:
    """A node's operands by suffix, as its function takes them: cut to the prompt, and inverted where that is cheaper.

    Raises ValueError for a weight that is missing or of another shape.
    """
    found = {}
    for suffix, shape in shapes(node.op).items():
        name = f"{node.name}.{suffix}"
        if name not in weights:
            raise ValueError(f"`weights` must hold {name!r} of shape {shape}, but it is missing.")
        value = np.asarray(weights[name], dtype=np.float64)
        if (axis := CUT_AXIS.get(type(node.op))) is not None and value.ndim == len(shape):
            value = value.take(range(min(shape[axis], value.shape[axis])), axis)
        if value.shape != shape:
            raise ValueError(f"weight {name!r} must have the shape {shape}, but has {value.shape}.")
        found[suffix] = 1 / value if (type(node.op), suffix) in INVERTED else value
    return found


def _embed(op: ops.TokenEmbedding, library: Library, own: Weights, hot: Array) -> Array:
    return library.numpy.matmul(hot, own["weight"])


def _add_positions(op: ops.PositionEmbedding, library: Library, own: Weights, source: Array) -> Array:
    return source + own["weight"]


def _layer_norm(op: ops.LayerNorm, library: Library, own: Weights, source: Array) -> Array:
    share = 1 / op.features
    centred = source - source.sum(axis=-1, keepdims=True) * share  # rows x features
    variance = library.numpy.square(centred).sum(axis=-1, keepdims=True) * share  # rows x 1
    return centred * library.rsqrt(variance + LAYERNORM_EPSILON) * own["weight"] + own["bias"]


def _linear(op: ops.Linear, library: Library, own: Weights, source: Array) -> Array:
    product = library.numpy.matmul(source, own["weight"].T)
    return product + own["bias"] if op.bias else product


def _rotary(op: ops.Rotary, library: Library, own: Weights, packed: Array) -> Array:
    """Pair (f, f + rotary_dim / 2) of queries and keys at position p turns by p * base^(-2 f / rotary_dim)."""
    rates = ROTARY_BASE ** -(np.arange(0, op.rotary_dim, 2) / op.rotary_dim)
    angles = np.arange(op.rows)[:, None] * rates  # rows x rotary_dim / 2
    cosines, sines = (np.tile(table(angles), 2)[:, None, None, :].astype(packed.dtype) for table in (np.cos, np.sin))
    heads = packed.reshape(op.rows, 3, op.heads, -1)  # rows x parts x heads x head_dim
    turned = heads[:, :2, :, : op.rotary_dim]
    first, second = turned[..., : op.rotary_dim // 2], turned[..., op.rotary_dim // 2 :]
    crossed = library.numpy.concatenate((-second, first), axis=-1)
    turned = library.numpy.concatenate((turned * cosines + crossed * sines, heads[:, :2, :, op.rotary_dim :]), axis=-1)
    return library.numpy.concatenate((turned, heads[:, 2:]), axis=1).reshape(packed.shape)


def _scores(op: ops.AttentionScores, library: Library, own: Weights, packed: Array) -> Array:
    """The public factor is applied to the queries, of which there are fewer than scores."""
    parts = packed.reshape(op.queries, -1, op.heads, op.head_dim)
    queries = (parts[:, 0] * op.head_dim**-0.5).transpose(1, 0, 2)  # heads x queries x head_dim
    return library.numpy.matmul(queries, parts[:, 1].transpose(1, 2, 0))


def _temper(op: ops.Temperature, library: Library, own: Weights, scores: Array) -> Array:
    return scores * own["weight"][:, :, None]


def _softmax(op: ops.Softmax, library: Library, own: Weights, scores: Array) -> Array:
    seen = np.tri(op.queries, op.keys, op.keys - op.queries, dtype=bool)  # public
    scores = library.numpy.where(seen, scores, MASKED_SCORE)
    powers = library.numpy.exp(scores - scores.max(axis=-1, keepdims=True))
    powers = library.numpy.where(seen, powers, 0.0)  # exact where a row's scores are all far below MASKED_SCORE
    return powers * (1 / powers.sum(axis=-1, keepdims=True))


def _shape(op: ops.ShapedAttention, library: Library, own: Weights, attention: Array) -> Array:
    uniform = np.tri(op.queries, op.keys) / np.arange(1, op.queries + 1)[:, None]
    scalars = {name: own[name][:, None, None] for name in ("identity", "softmax", "uniform")}
    fixed = scalars["identity"] * np.eye(op.queries, op.keys) - scalars["uniform"] * uniform
    return attention * scalars["softmax"] + fixed


def _mix(op: ops.AttentionMix, library: Library, own: Weights, attention: Array, source: Array) -> Array:
    """The values are the last heads x head_dim features of the source, whether it is packed or values alone."""
    values = source[:, -op.heads * op.head_dim :].reshape(op.keys, op.heads, op.head_dim).transpose(1, 0, 2)
    mixed = library.numpy.matmul(attention, values)  # heads x queries x head_dim
    return mixed.transpose(1, 0, 2).reshape(op.queries, op.heads * op.head_dim)


def _gelu(op: ops.Gelu, library: Library, own: Weights, source: Array) -> Array:
    if op.form == "exact":
        return source * (library.erf(source * 0.5**0.5) * 0.5 + 0.5)
    slope = (2 / np.pi) ** 0.5
    inner = source * (library.numpy.square(source) * (GELU_TANH_CUBIC * slope) + slope)
    return source * (library.numpy.tanh(inner) * 0.5 + 0.5)


def _relu(op: ops.Relu, library: Library, own: Weights, source: Array) -> Array:
    return library.numpy.maximum(source, 0.0)


def _leaky_relu(op: ops.LeakyRelu, library: Library, own: Weights, source: Array) -> Array:
    """One comparison: x+ + slope (x - x+)."""
    positive = library.numpy.maximum(source, 0.0)
    return positive + (source - positive) * own["slope"]


def _add(op: ops.Add, library: Library, own: Weights, stream: Array, branch: Array) -> Array:
    return stream + branch


def _scaled_add(op: ops.ScaledAdd, library: Library, own: Weights, stream: Array, branch: Array) -> Array:
    return stream * own["beta"] + branch * own["alpha"]  # alpha comes inverted


def _project(op: ops.VocabProjection, library: Library, own: Weights, source: Array) -> Array:
    return library.numpy.matmul(source, own["weight"].T)


FUNCTIONS: dict[type, Callable[..., Array]] = {
    ops.TokenEmbedding: _embed,
    ops.PositionEmbedding: _add_positions,
    ops.LayerNorm: _layer_norm,
    ops.Linear: _linear,
    ops.Rotary: _rotary,
    ops.AttentionScores: _scores,
    ops.Temperature: _temper,
    ops.Softmax: _softmax,
    ops.ShapedAttention: _shape,
    ops.AttentionMix: _mix,
    ops.Gelu: _gelu,
    ops.Relu: _relu,
    ops.LeakyRelu: _leaky_relu,
    ops.Add: _add,
    ops.ScaledAdd: _scaled_add,
    ops.VocabProjection: _project,
}
