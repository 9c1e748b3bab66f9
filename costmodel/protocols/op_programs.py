"""The calls of primitives that each op makes when the engine runs the op's function in `execution.op_functions`.

Everything is secret except temperatures, score bounds, the scalars of shaped attention, the factors of scores and of
`Scale`, the causal mask, rotary angles, and weights that a deployment makes public. Other weights are shared by all
parties or held by the server, as the setting says. The client shares its tokens one-hot, or as ids if the embedding
looks them up. The logits stay shared. Steps without a call are local. The engine's compiler drops products with a
constant 1 and reductions over one element, so some shapes of size 1 have their own programs.
"""

from collections.abc import Callable
from itertools import product
from math import ceil, prod, sqrt
from typing import Any

from costmodel import ops
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Op
from costmodel.protocols import fixed_point
from costmodel.protocols.primitives import Call, Calls, EngineSetting, Primitive, on

TILE_BYTES = 256 * 1024 * 1024  # ring.cc, _mmul: larger operands are multiplied tile by tile
MOST_TILES = 10_000  # with operands of up to 2.7 TB; each tile is a separate call
SKEWED = 8  # ring.cc, calcMmulTilingSize: a matrix is long or flat if one dimension is this many times the others
SHARED: Calls = (Call(primitive="share", elements=1),)  # of a public number, such as the initial value of a sum


def calls_of(op: Op, setting: EngineSetting, *, share_bytes: int) -> Calls:
    """Return the calls of one op, in order; a local op has none.

    `share_bytes` is the bytes of one party's share of one element; they decide how a matrix product is cut into tiles.
    A UserError is raised for an op without a program, a product of more than `MOST_TILES` tiles, or a division, square
    root or erf in a ring of 32 bits.
    """
    if op.is_local:
        return ()
    if per_element := ELEMENTWISE.get(type(op)):
        return on(prod(op.output_shape), per_element(op, setting))
    if type(op) not in PROGRAMS:
        raise UnpricedOpError(f"no program states the calls of {type(op).__name__}; add one to PROGRAMS.")
    return PROGRAMS[type(op)](op, setting, share_bytes)


def matmul(m: int, k: int, n: int, setting: EngineSetting, share_bytes: int, *, weights_of: Op | None = None) -> Calls:
    """Return the calls of the product of an m x k and a k x n matrix: one per tile, and one to truncate the result.

    `weights_of` is the op whose weight is the right factor, or None if that factor is a secret activation. A UserError
    is raised for more than `MOST_TILES` tiles.
    """
    primitive: Primitive = "public_matmul" if weights_of and weights_of.public else "matmul"
    hidden = weights_of is not None and weights_of.hides_weights
    private, opened = hidden and setting.weights == "server", hidden and setting.weight_masks == "kept"
    m_step, k_step, n_step = _tile(m, k, n, share_bytes)
    if (num_tiles := ceil(m / m_step) * ceil(k / k_step) * ceil(n / n_step)) > MOST_TILES:
        raise UserError(
            f"a matrix product must be of at most {MOST_TILES} tiles of up to {TILE_BYTES // 2**20} MiB, "
            f"but {m} x {k} times {k} x {n} takes {num_tiles}; choose smaller dimensions."
        )
    tiles = [
        Call(
            primitive=primitive,
            elements=rows * columns,
            operands=inner * (rows + columns),
            factors=(rows, columns),
            private=private,
            opened=opened,
        )
        for rows, columns, inner in product(_cuts(m, m_step), _cuts(n, n_step), _cuts(k, k_step))
    ]
    return (*tiles, *on(m * n, fixed_point.truncate(setting)))


def matrix_work(calls: Calls) -> dict[str, int]:
    """Return the work of the matrix products in `calls`: `products` of numbers, and `operands`, elements of factors."""
    products = [(call.operands // sum(call.factors)) * call.elements for call in calls if call.factors]
    return {"products": sum(products), "operands": sum(call.operands for call in calls)}


def _cuts(length: int, step: int) -> list[int]:
    return [min(step, length - start) for start in range(0, length, step)]


def _tile(m: int, k: int, n: int, share_bytes: int) -> tuple[int, int, int]:
    """Return the size of a tile in each dimension. Source: ring.cc, calcMmulTilingSize."""
    if k * (m + n) * share_bytes < TILE_BYTES:
        return m, k, n
    limit = TILE_BYTES // share_bytes
    if k > (m + n) * SKEWED:
        outer, k_step = m + n, max(1, ceil(limit / (m + n)))
    elif m + n > k * SKEWED:
        outer, k_step = max(1, ceil(limit / k)), k
    else:
        side = sqrt(limit / (k / (m + n)))
        outer, k_step = max(1, ceil(side)), max(1, ceil(limit / side))
    return max(1, outer * m // (m + n)), k_step, max(1, outer * n // (m + n))


def _embed(op: ops.TokenEmbedding, setting: EngineSetting, share_bytes: int) -> Calls:
    """Look tokens up, if they are not one-hot, by comparing each with every entry of the public vocabulary."""
    one_hot = on(op.tokens * op.vocab, fixed_point.EQUAL) if op.encoding == "lookup" else ()
    return one_hot + matmul(op.tokens, op.vocab, op.features, setting, share_bytes, weights_of=op)


def _norm(op: ops.LayerNorm | ops.RmsNorm, setting: EngineSetting, share_bytes: int) -> Calls:
    """Multiply each row by the inverse root of its mean square, and by the gain; LayerNorm first subtracts its mean."""
    elements, roots = op.rows * op.features, op.num_roots if isinstance(op, ops.RmsNorm) else op.rows
    start, means = ((), ()) if elements == roots else (SHARED, on(roots, fixed_point.truncate(setting)))
    squares = on(elements, fixed_point.product(setting))
    root = on(roots, fixed_point.reciprocal_square_root(setting))
    gain = fixed_point.weight_product(op, setting) if op.affine else ()
    has_bias = isinstance(op, ops.LayerNorm) and op.affine and op.bias
    bias = fixed_point.weight_sum(op, setting) if has_bias else ()
    products = on(elements, fixed_point.product(setting) + gain + bias)
    return start + (means if isinstance(op, ops.LayerNorm) else ()) + squares + means + root + products


def _frozen_norm(op: ops.FrozenNorm, setting: EngineSetting, share_bytes: int) -> Calls:
    gained = on(op.rows * op.features, fixed_point.weight_product(op, setting))
    if not op.centred:
        return gained
    means = () if op.features == 1 else SHARED + on(op.rows, fixed_point.truncate(setting))
    return means + gained + on(op.rows * op.features, fixed_point.weight_sum(op, setting))


def _linear(op: ops.Linear, setting: EngineSetting, share_bytes: int) -> Calls:
    bias = on(op.rows * op.out_features, fixed_point.weight_sum(op, setting)) if op.bias else ()
    return matmul(op.rows, op.in_features, op.out_features, setting, share_bytes, weights_of=op) + bias


def _rotary(op: ops.Rotary, setting: EngineSetting, share_bytes: int) -> Calls:
    """Multiply queries and keys by cosines, and their crossed halves by sines; all angles are public."""
    turned = op.rows * (op.heads + (op.key_heads or op.heads)) * op.rotary_dim
    is_first = op.rows == op.sequences and op.past_len == 0  # turns by 0: times a constant 1, plus a constant 0
    return on(turned, SHARED if is_first else fixed_point.truncate(setting) * 2)


def _scores(op: ops.AttentionScores, setting: EngineSetting, share_bytes: int) -> Calls:
    """Multiply matrices head by head. Source: hlo/basic_binary.cc, DotGeneral."""
    factor = 1 if not op.scaled else op.head_dim**-0.5 if op.factor is None else op.factor
    scaled = on(op.heads * op.queries * op.head_dim, fixed_point.constant_product(factor, setting))
    return scaled + matmul(op.queries, op.head_dim, op.keys, setting, share_bytes) * op.heads


def _softmax(op: ops.Softmax, setting: EngineSetting, share_bytes: int) -> Calls:
    """Make the scores nonnegative, as the form says, and divide each row by its sum."""
    rows = op.heads * op.queries
    if op.keys == 1 and op.form in ("exact", "bounded"):  # the engine drops the quotient x / x, but computes x
        return on(rows, fixed_point.exponential(setting))
    if op.keys == 1 and op.form == "power8":  # all weight on the one key
        return ()
    start = () if op.keys == 1 else SHARED
    maxima = on(rows, fixed_point.reduction(op.keys, fixed_point.MAXIMUM))
    powers = on(rows * op.keys, fixed_point.exponential(setting))
    forms = {
        "exact": start + maxima + powers,
        "bounded": powers,
        "2quad": on(rows * op.keys, fixed_point.product(setting)),
        "power8": on(rows * op.keys, fixed_point.product(setting) * 3),
        "relu": on(rows * op.keys, fixed_point.MAXIMUM),
    }
    normalise = on(rows, fixed_point.reciprocal(setting)) + on(rows * op.keys, fixed_point.product(setting))
    return forms[op.form] + start + normalise


def _gelu(op: ops.Gelu, setting: EngineSetting) -> Calls:
    pair, factor = fixed_point.product(setting), fixed_point.truncate(setting)
    forms = {
        "tanh": pair + factor + pair + fixed_point.tanh(setting) + factor + pair,
        "exact": factor + fixed_point.error_function(setting) + factor + pair,
        # x^2, then x^3 and x^4, then x^6; two polynomials; three comparisons and as many selections
        "piecewise": pair + on(2, pair) + pair + on(2, factor) + on(3, fixed_point.MAXIMUM),
    }
    return forms[op.form]


# element-wise op -> the calls for one element of its output
# A product with a public factor is local except for its truncation. Source: libspu/kernel/hal/fxp_base.cc, f_mul.
# x * x is compiled to a product of two secrets, not to a square. Source:
# libspu/kernel/hal/polymorphic.cc, mul, which calls fxp_base.cc, f_mul, and not f_square.
ELEMENTWISE: dict[type, Callable[[Any, EngineSetting], Calls]] = {
    ops.PositionEmbedding: lambda op, setting: fixed_point.weight_sum(op, setting),
    ops.Temperature: lambda op, setting: fixed_point.truncate(setting),
    ops.ShapedAttention: lambda op, setting: fixed_point.truncate(setting),
    ops.Gelu: _gelu,
    ops.Relu: lambda op, setting: fixed_point.MAXIMUM,
    ops.LeakyRelu: lambda op, setting: fixed_point.MAXIMUM + fixed_point.weight_product(op, setting),
    ops.Square: lambda op, setting: fixed_point.product(setting),
    ops.Silu: lambda op, setting: fixed_point.sigmoid(setting) + fixed_point.product(setting),
    ops.Sigmoid: lambda op, setting: fixed_point.sigmoid(setting),
    ops.Tanh: lambda op, setting: fixed_point.tanh(setting),
    ops.Multiply: lambda op, setting: fixed_point.product(setting),
    ops.Scale: lambda op, setting: fixed_point.constant_product(op.factor, setting),
    ops.ScaledAdd: lambda op, setting: fixed_point.weight_product(op, setting) * 2,
}


PROGRAMS: dict[type, Callable[[Any, EngineSetting, int], Calls]] = {
    ops.TokenEmbedding: _embed,
    ops.LayerNorm: _norm,
    ops.RmsNorm: _norm,
    ops.FrozenNorm: _frozen_norm,
    ops.Linear: _linear,
    ops.Rotary: _rotary,
    ops.AttentionScores: _scores,
    ops.Softmax: _softmax,
    ops.AttentionMix: lambda op, setting, share_bytes: (
        matmul(op.queries, op.keys, op.head_dim, setting, share_bytes) * op.heads
    ),
    ops.VocabProjection: lambda op, setting, share_bytes: matmul(
        op.rows, op.features, op.vocab, setting, share_bytes, weights_of=op
    ),
}
