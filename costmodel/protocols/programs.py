"""Op -> calls: what every function of `costmodel.execute` does to secrets, step by step.

Everything is secret but what `costmodel.execute` calls public: the temperatures, the scalars of shaped attention,
the causal mask and the rotary angles. The client one-hot encodes its tokens; the logits of all tokens stay shared.
A step that no call stands for is local. The engine's compiler drops products with a constant 1 and reductions over one
element, which is why some shapes of size 1 have programs of their own.
"""

from collections.abc import Callable
from math import ceil, sqrt
from typing import Any

from costmodel import ops
from costmodel.ops import Op
from costmodel.protocols import functions
from costmodel.protocols.calls import Call, Calls, Setting, on

TILE_BYTES = 256 * 1024 * 1024  # ring.cc, _mmul: larger operands are multiplied tile by tile
SKEWED = 8  # ring.cc, calcMmulTilingSize: a matrix is long or flat when one dimension is so many times the others
SHARED: Calls = (Call(primitive="share", elements=1),)  # such as what a sum or a maximum over an axis starts from


def calls_of(op: Op, setting: Setting, *, share_bytes: int) -> Calls:
    """The calls of one op.

    share_bytes: of one party's share of one element, which decides how large a matrix product is cut to tiles.

    Raises ValueError for an op that has no program.
    """
    if type(op) not in PROGRAMS:
        raise ValueError(f"no program states the calls of {type(op).__name__}; add one to PROGRAMS.")
    return PROGRAMS[type(op)](op, setting, share_bytes)


def matmul(m: int, k: int, n: int, setting: Setting, share_bytes: int) -> Calls:
    """m x k times k x n, in tiles where the engine cuts them, and one truncation of the result."""
    m_step, k_step, n_step = _tile(m, k, n, share_bytes)
    calls: Calls = ()
    for rows in _cuts(m, m_step):
        for columns in _cuts(n, n_step):
            for inner in _cuts(k, k_step):
                operands = inner * (rows + columns)
                shape = (rows, columns)
                calls += (Call(primitive="matmul", elements=rows * columns, operands=operands, factors=shape),)
    return calls + on(m * n, functions.truncate(setting))


def _cuts(length: int, step: int) -> list[int]:
    return [min(step, length - start) for start in range(0, length, step)]


def _tile(m: int, k: int, n: int, share_bytes: int) -> tuple[int, int, int]:
    """How large a tile of each dimension is. Source: ring.cc, calcMmulTilingSize."""
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


def _heads(op: Any, calls: Calls) -> Calls:
    """One matrix product per head, one after the other. Source: hlo/basic_binary.cc, DotGeneral."""
    return calls * int(op.heads)


def _embed(op: ops.TokenEmbedding, setting: Setting, share_bytes: int) -> Calls:
    return matmul(op.tokens, op.vocab, op.features, setting, share_bytes)


def _local(op: Op, setting: Setting, share_bytes: int) -> Calls:
    return ()


def _layer_norm(op: ops.LayerNorm, setting: Setting, share_bytes: int) -> Calls:
    """Mean, squares of what is left, their mean, its inverse root, and two products: by the root and by the gain."""
    start = () if op.features == 1 else SHARED
    means = () if op.features == 1 else on(op.rows, functions.public_product(setting))
    squares = on(op.rows * op.features, functions.product(setting))
    root = on(op.rows, functions.reciprocal_square_root(setting))
    return start + means + squares + means + root + on(op.rows * op.features, functions.product(setting) * 2)


def _linear(op: ops.Linear, setting: Setting, share_bytes: int) -> Calls:
    return matmul(op.rows, op.in_features, op.out_features, setting, share_bytes)


def _rotary(op: ops.Rotary, setting: Setting, share_bytes: int) -> Calls:
    """Queries and keys times cosines, and their crossed halves times sines; all angles are public."""
    turned = 2 * op.rows * op.heads * op.rotary_dim
    if op.rows == 1:  # the first position turns by 0: times a constant 1, plus a constant 0
        return on(turned, SHARED)
    return on(turned, functions.public_product(setting) * 2)


def _scores(op: ops.AttentionScores, setting: Setting, share_bytes: int) -> Calls:
    scaled = () if op.head_dim == 1 else on(op.heads * op.queries * op.head_dim, functions.public_product(setting))
    return scaled + _heads(op, matmul(op.queries, op.head_dim, op.keys, setting, share_bytes))


def _public_factor(op: ops.Temperature | ops.ShapedAttention, setting: Setting, share_bytes: int) -> Calls:
    return on(op.heads * op.queries * op.keys, functions.public_product(setting))


def _softmax(op: ops.Softmax, setting: Setting, share_bytes: int) -> Calls:
    """Row maximum, exponential, row sum, its reciprocal, and one product."""
    rows = op.heads * op.queries
    if op.keys == 1:  # what is left of x / x is x
        return on(rows, functions.exponential(setting))
    maxima = on(rows, functions.reduction(op.keys, functions.maximum(setting)))
    powers = on(rows * op.keys, functions.exponential(setting))
    normalise = on(rows, functions.reciprocal(setting)) + on(rows * op.keys, functions.product(setting))
    return SHARED * 2 + maxima + powers + normalise


def _mix(op: ops.AttentionMix, setting: Setting, share_bytes: int) -> Calls:
    return _heads(op, matmul(op.queries, op.keys, op.head_dim, setting, share_bytes))


def _gelu(op: ops.Gelu, setting: Setting, share_bytes: int) -> Calls:
    product, factor = functions.product(setting), functions.public_product(setting)
    forms = {
        "tanh": product + factor + product + functions.tanh(setting) + factor + product,
        "exact": factor + functions.error_function(setting) + factor + product,
    }
    return on(op.rows * op.features, forms[op.form])


def _relu(op: ops.Relu, setting: Setting, share_bytes: int) -> Calls:
    return on(op.rows * op.features, functions.maximum(setting))


def _leaky_relu(op: ops.LeakyRelu, setting: Setting, share_bytes: int) -> Calls:
    return on(op.rows * op.features, functions.maximum(setting) + functions.product(setting))


def _scaled_add(op: ops.ScaledAdd, setting: Setting, share_bytes: int) -> Calls:
    return on(op.rows * op.features, functions.product(setting) * 2)


def _project(op: ops.VocabProjection, setting: Setting, share_bytes: int) -> Calls:
    return matmul(op.rows, op.features, op.vocab, setting, share_bytes)


PROGRAMS: dict[type, Callable[[Any, Setting, int], Calls]] = {
    ops.TokenEmbedding: _embed,
    ops.PositionEmbedding: _local,
    ops.LayerNorm: _layer_norm,
    ops.Linear: _linear,
    ops.Rotary: _rotary,
    ops.AttentionScores: _scores,
    ops.Temperature: _public_factor,
    ops.Softmax: _softmax,
    ops.ShapedAttention: _public_factor,
    ops.AttentionMix: _mix,
    ops.Gelu: _gelu,
    ops.Relu: _relu,
    ops.LeakyRelu: _leaky_relu,
    ops.Add: _local,
    ops.ScaledAdd: _scaled_add,
    ops.VocabProjection: _project,
}
