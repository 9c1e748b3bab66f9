"""The function of every op, on a library's arrays: numpy computes in plaintext, and SPU compiles jax.numpy.

Shapes: activations are rows x features; scores and attention weights are heads x queries x keys; a packed projection is
rows x (parts x heads x head_dim), its parts queries, keys and, if there are three, values. Before `RepeatHeads`, keys
and values may have fewer heads. With several sequences, rows are all first tokens, then all second tokens; heads are
those of the first sequence, then of the second.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import Op
from costmodel.ops.rotary import rotary_rates

Array: TypeAlias = Any  # numpy.ndarray, or an array of the library, such as one that jax traces
Weights: TypeAlias = Mapping[str, Array]

LAYERNORM_EPSILON = 1e-5  # Radford et al. 2019, GPT-2, and torch's default
QUAD_SHIFT = 5.0  # c of (x + c)^2. Source: Li et al. 2023, MPCFormer, https://arxiv.org/abs/2211.01452
RELU_SUM_OFFSET = 2.0**-10  # keeps a row without a positive score finite; 18 fraction bits can represent it
GELU_TANH_CUBIC = 0.044715  # Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The array functions that ops need: `numpy` or a module with its interface, and functions that numpy lacks."""

    numpy: Any
    erf: Callable[[Array], Array]
    rsqrt: Callable[[Array], Array]

    def mean_square(self, source: Array) -> Array:
        """Return the mean square over the last dimension, which then has length 1."""
        return self.numpy.square(source).sum(axis=-1, keepdims=True) * (1 / source.shape[-1])


def numpy_library() -> Library:
    """Return the library that computes in plaintext, with numpy."""
    from scipy.special import erf  # only an exact GELU needs it

    return Library(numpy=np, erf=erf, rsqrt=lambda source: 1 / np.sqrt(source))


def rounded_to(unit: float, value: Array, rounding: Callable[..., Array]) -> Array:
    """Return a value rounded to multiples of `unit` by np.round, np.floor or np.trunc."""
    rounded = np.asarray(value / unit)  # the only new array: the table of a large vocabulary takes more than a gigabyte
    rounding(rounded, out=rounded)
    rounded *= unit
    return rounded


def evaluate(op: Op, library: Library, weights: Weights, *inputs: Array) -> Array:
    """Return an op's output, given its weights by suffix, and its inputs. Raise UserError if it has no function."""
    if type(op) not in FUNCTIONS:
        raise UserError(f"no function runs {type(op).__name__}; add one to FUNCTIONS.")
    return FUNCTIONS[type(op)](op, library, weights, *inputs)


def _embed(op: ops.TokenEmbedding, library: Library, weights: Weights, tokens: Array) -> Array:
    """Embed tokens; ids that are looked up are first compared with each entry of the public vocabulary."""
    if op.encoding == "lookup":
        is_entry = tokens[:, None] == np.arange(op.vocab, dtype=np.float32)  # tokens x vocab
        tokens = library.numpy.where(is_entry, 1.0, 0.0)
    return library.numpy.matmul(tokens, weights["weight"])


def _layer_norm(op: ops.LayerNorm, library: Library, weights: Weights, source: Array) -> Array:
    centred = source - source.sum(axis=-1, keepdims=True) * (1 / op.features)  # rows x features
    variance = library.mean_square(centred)  # rows x 1
    normed = centred * library.rsqrt(variance + LAYERNORM_EPSILON)
    gained = normed * weights["weight"] if op.affine else normed
    return gained + weights["bias"] if op.affine and op.bias else gained


def _rms_norm(op: ops.RmsNorm, library: Library, weights: Weights, source: Array) -> Array:
    shape, width = source.shape, op.features // op.groups
    parts = source if op.groups == 1 else source.reshape(op.rows, op.groups, width)
    mean_square = library.mean_square(parts)  # rows x 1, or x groups x 1
    normed = parts * library.rsqrt(mean_square + op.epsilon)
    return (normed * weights["weight"] if op.affine else normed).reshape(shape)


def _frozen_norm(op: ops.FrozenNorm, library: Library, weights: Weights, source: Array) -> Array:
    if not op.centred:
        return source * weights["weight"]
    centred = source - source.sum(axis=-1, keepdims=True) * (1 / op.features)  # rows x features
    return centred * weights["weight"] + weights["bias"]


def _linear(op: ops.Linear, library: Library, weights: Weights, source: Array) -> Array:
    product = library.numpy.matmul(source, weights["weight"])  # already transposed
    return product + weights["bias"] if op.bias else product


def _rotary(op: ops.Rotary, library: Library, weights: Weights, packed: Array) -> Array:
    """Rotate each pair (f, f + rotary_dim / 2) of queries and keys by its rate times the position."""
    rates = np.array(rotary_rates(op.rotary_dim, op.base, op.scaling))
    positions = np.arange(op.past_len, op.past_len + op.rows // op.sequences).repeat(op.sequences)
    angles = positions[:, None] * rates  # rows x rotary_dim / 2
    cosines, sines = (np.tile(table(angles), 2)[:, None, :].astype(packed.dtype) for table in (np.cos, np.sin))
    key_heads = op.key_heads or op.heads
    heads = packed.reshape(op.rows, op.heads + 2 * key_heads, -1)  # queries, keys, values
    rotated = heads[:, : op.heads + key_heads]
    turned = rotated[..., : op.rotary_dim]
    first, second = turned[..., : op.rotary_dim // 2], turned[..., op.rotary_dim // 2 :]
    crossed = library.numpy.concatenate((-second, first), axis=-1)
    turned = library.numpy.concatenate((turned * cosines + crossed * sines, rotated[..., op.rotary_dim :]), axis=-1)
    return library.numpy.concatenate((turned, heads[:, op.heads + key_heads :]), axis=1).reshape(packed.shape)


def _repeat(op: ops.RepeatHeads, library: Library, weights: Weights, packed: Array) -> Array:
    heads = packed.reshape(op.rows, op.heads + 2 * op.key_heads, op.head_dim)
    repeated = library.numpy.repeat(heads[:, op.heads :], op.heads // op.key_heads, axis=1)
    return library.numpy.concatenate((heads[:, : op.heads], repeated), axis=1).reshape(op.rows, -1)


def _keep(op: ops.KeyValueCache, library: Library, weights: Weights, *sources: Array) -> Array:
    *earlier, source = sources
    return library.numpy.concatenate((*earlier, source[:, -op.features :]), axis=0)


def _scores(op: ops.AttentionScores, library: Library, weights: Weights, packed: Array, *cached: Array) -> Array:
    """Return the scores. The public factor is applied to the queries, of which there are fewer than scores.

    `packed` has queries, then keys; `cached` starts with the keys of all tokens, if `packed` has only the last tokens.
    """
    shape = (op.sequences, -1, op.heads // op.sequences, op.head_dim)
    parts = packed.reshape(op.queries, *shape)
    factor = op.head_dim**-0.5 if op.factor is None else op.factor
    queries = parts[:, :, 0] * factor if op.scaled else parts[:, :, 0]
    keys = cached[0].reshape(op.keys, *shape)[:, :, 0] if cached else parts[:, :, 1]
    return library.numpy.matmul(_by_head(queries), _by_head(keys).transpose(0, 2, 1))


def _by_head(tokens: Array) -> Array:
    """Transpose tokens x sequences x heads x head_dim to (heads of all sequences) x tokens x head_dim."""
    return tokens.transpose(1, 2, 0, 3).reshape(-1, len(tokens), tokens.shape[-1])


def _softmax(op: ops.Softmax, library: Library, weights: Weights, scores: Array) -> Array:
    last_seen = op.keys - op.queries if op.causal else op.keys
    seen = np.tri(op.queries, op.keys, last_seen, dtype=bool)  # public
    positive, offset = SOFTMAX_FORMS[op.form](library, seen, scores)
    positive = library.numpy.where(seen, positive, 0.0)
    return positive * (1 / (positive.sum(axis=-1, keepdims=True) + offset))


def _powers(library: Library, seen: Array, scores: Array) -> tuple[Array, float]:
    scores = library.numpy.where(seen, scores, scores[..., :1])  # every query sees the first key: same maximum
    return library.numpy.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0


def _eighth_powers(library: Library, seen: Array, scores: Array) -> tuple[Array, float]:
    square = library.numpy.square
    is_alone = seen & (seen.sum(axis=-1, keepdims=True) == 1)  # public; the power of its only score may be close to 0
    return library.numpy.where(is_alone, 1.0, square(square(square(scores)))), 0.0


# form -> a non-negative number for every score, and what is added to their sum over a row
SOFTMAX_FORMS: dict[str, Callable[[Library, Array, Array], tuple[Array, float]]] = {
    "exact": _powers,
    "2quad": lambda library, seen, scores: (library.numpy.square(scores + QUAD_SHIFT), 0.0),
    "power8": _eighth_powers,
    "relu": lambda library, seen, scores: (library.numpy.maximum(scores, 0.0), RELU_SUM_OFFSET),
    "bounded": lambda library, seen, scores: (library.numpy.exp(scores), 0.0),
}


def _shape(op: ops.ShapedAttention, library: Library, weights: Weights, attention: Array) -> Array:
    earlier = op.keys - op.queries
    uniform = np.tri(op.queries, op.keys, earlier) / np.arange(earlier + 1, op.keys + 1)[:, None]
    scalars = {name: library.numpy.tile(value, op.sequences)[:, None, None] for name, value in weights.items()}
    fixed = scalars["identity"] * np.eye(op.queries, op.keys, earlier) - scalars["uniform"] * uniform
    return attention * scalars["softmax"] + fixed


def _mix(op: ops.AttentionMix, library: Library, weights: Weights, attention: Array, source: Array) -> Array:
    """Mix values, which are the last heads x head_dim features of the source, whether it is packed or only values."""
    heads = op.heads // op.sequences
    values = source[:, -heads * op.head_dim :].reshape(op.keys, op.sequences, heads, op.head_dim)
    mixed = library.numpy.matmul(attention, _by_head(values))  # heads of all sequences x queries x head_dim
    mixed = mixed.reshape(op.sequences, heads, op.queries, op.head_dim).transpose(2, 0, 1, 3)
    return mixed.reshape(op.queries * op.sequences, heads * op.head_dim)


def _gelu_tanh(library: Library, source: Array) -> Array:
    slope = (2 / np.pi) ** 0.5
    inner = source * (library.numpy.square(source) * (GELU_TANH_CUBIC * slope) + slope)
    return source * (library.numpy.tanh(inner) * 0.5 + 0.5)


# GELU by polynomials between thresholds, with comparisons and products but without exponentials and divisions:
#     gelu(x) = 0 below -5,  cubic(x) below -1.97,  x / 2 + even(x) below 3,  x above
# GELU minus x / 2 is an even function, hence the even polynomial, of degree 6. The greatest error is 0.0104, at 2.72.
# Source: thresholds and degrees of Lu et al. 2023, BumbleBee, https://eprint.iacr.org/2023/1678. The coefficients are a
# least-squares fit to GELU on Chebyshev points, which `tests/costmodel/execution/test_piecewise_gelu.py` repeats. They
# are multiples of 2^-18, the resolution of the engine's default of 18 fraction bits. An error of half of that in the
# last coefficient moves the result by 3^6 times as much at x = 3, or 0.0014.
THRESHOLDS = (-5.0, -1.97, 3.0)
CUBIC = (-0.3805503845214844, -0.2882499694824219, -0.07190322875976562, -0.0059051513671875)  # of 1, x, x^2, x^3
EVEN = (0.0102691650390625, 0.3566856384277344, -0.036548614501953125, 0.001708984375)  # of 1, x^2, x^4, x^6
# coefficients of x, x^2, x^3, x^4 and x^6 in both polynomials
PIECES = np.array([[*CUBIC[1:], 0.0, 0.0], [0.5, EVEN[1], 0.0, *EVEN[2:]]])


def _gelu_piecewise(library: Library, source: Array) -> Array:
    """Start from the identity, and for each threshold above x add the step to the piece on the threshold's left.

    Powers, comparisons and steps are each computed at once. Both polynomials are one product with a public matrix, so
    their sums are truncated, and not their terms. A power that overflows cancels with the step from its piece.
    """
    stack = library.numpy.stack
    second = library.numpy.square(source)
    third, fourth = stack((source, second)) * second
    powers = stack((source, second, third, fourth, fourth * second))  # 5 x rows x features
    shape = (2, *source.shape)
    cubic, even = library.numpy.matmul(PIECES.astype(source.dtype), powers.reshape(len(powers), -1)).reshape(shape)
    cubic, even = cubic + CUBIC[0], even + EVEN[0]
    below = stack((source,) * 3) < np.array(THRESHOLDS, dtype=source.dtype)[:, None, None]
    steps = library.numpy.where(below, stack((-cubic, cubic - even, even - source)), 0.0)
    return source + steps[0] + steps[1] + steps[2]


GELU_FORMS: dict[str, Callable[[Library, Array], Array]] = {
    "tanh": _gelu_tanh,
    "exact": lambda library, source: source * (library.erf(source * 0.5**0.5) * 0.5 + 0.5),
    "piecewise": _gelu_piecewise,
}


def _leaky_relu(op: ops.LeakyRelu, library: Library, weights: Weights, source: Array) -> Array:
    """Return x+ + slope (x - x+), which takes one comparison."""
    positive = library.numpy.maximum(source, 0.0)
    return positive + (source - positive) * weights["slope"]


def _square(op: ops.Square, library: Library, weights: Weights, source: Array) -> Array:
    square = library.numpy.square(source)
    return square + op.shift if op.shift else square


def _sigmoid(op: ops.Sigmoid | ops.Silu, library: Library, weights: Weights, source: Array) -> Array:
    return 1 / (library.numpy.exp(-source) + 1)


FUNCTIONS: dict[type, Callable[..., Array]] = {
    ops.TokenEmbedding: _embed,
    ops.PositionEmbedding: lambda op, library, weights, source: (
        source + library.numpy.repeat(weights["weight"], op.sequences, axis=0)
    ),
    ops.LayerNorm: _layer_norm,
    ops.RmsNorm: _rms_norm,
    ops.FrozenNorm: _frozen_norm,
    ops.Linear: _linear,
    ops.PackHeads: lambda op, library, weights, *parts: library.numpy.concatenate(parts, axis=1),
    ops.Rotary: _rotary,
    ops.RepeatHeads: _repeat,
    ops.KeyValueCache: _keep,
    ops.AttentionScores: _scores,
    ops.Temperature: lambda op, library, weights, scores: (
        scores * library.numpy.tile(weights["weight"], (op.sequences, 1))[:, :, None]
    ),
    ops.ScoreBound: lambda op, library, weights, scores: (
        scores - library.numpy.tile(weights["weight"], op.sequences)[:, None, None]
    ),
    ops.Softmax: _softmax,
    ops.ShapedAttention: _shape,
    ops.AttentionMix: _mix,
    ops.Gelu: lambda op, library, weights, source: GELU_FORMS[op.form](library, source),
    ops.Relu: lambda op, library, weights, source: library.numpy.maximum(source, 0.0),
    ops.LeakyRelu: _leaky_relu,
    ops.Square: _square,
    ops.Silu: lambda op, library, weights, source: source * _sigmoid(op, library, weights, source),
    ops.Sigmoid: _sigmoid,
    ops.Tanh: lambda op, library, weights, source: library.numpy.tanh(source),
    ops.Multiply: lambda op, library, weights, first, second: first * second,
    ops.Scale: lambda op, library, weights, source: source * op.factor,
    ops.Add: lambda op, library, weights, stream, branch: stream + branch,
    ops.ScaledAdd: lambda op, library, weights, stream, branch: stream * weights["beta"] + branch * weights["alpha"],
    ops.TakeRows: lambda op, library, weights, source: source[op.first : op.first + op.taken],
    ops.TakeColumns: lambda op, library, weights, source: source[:, op.first : op.first + op.taken],
    ops.JoinRows: lambda op, library, weights, *parts: library.numpy.concatenate(parts, axis=0),
    ops.JoinColumns: lambda op, library, weights, *parts: library.numpy.concatenate(parts, axis=1),
    ops.VocabProjection: lambda op, library, weights, source: library.numpy.matmul(source, weights["weight"]),
}
