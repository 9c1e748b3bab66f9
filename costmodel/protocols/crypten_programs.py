"""Op -> steps of protocol `crypten`: what its tensors do when the op's function in `execution.op_functions` asks them.

Weights are secret-shared; what `execution.interpreter` calls public is local, and so are all truncations, which its two
parties make alone: one of them is wrong by 2^48 now and then, more often the larger the number.
Its exponential, reciprocal and roots are iterations that come out right in a range alone, which no price knows: sums
of a row must be below about 256, so a softmax of many like scores fails.
"""

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

from costmodel import ops
from costmodel.errors import UnpricedOpError
from costmodel.ops import Op
from costmodel.protocols.crypten_primitives import (
    exponential,
    inverse_root,
    is_negative,
    is_zero,
    logistic,
    maximum,
    positive_part,
    product,
    reciprocal,
    square,
)
from costmodel.protocols.crypten_setting import CryptenSetting
from costmodel.protocols.primitives import NOTHING, Comm, refuse_public, total_comm

OTHERS = "choose protocol semi2k, aby3 or cheetah"
NUM_PIECES = 3  # thresholds of the piecewise GELU

Formula: TypeAlias = Callable[[Any, CryptenSetting], Comm]


def comm(op: Op, setting: CryptenSetting) -> Comm:
    """Rounds, messages and bytes of one op. Raises UserError for an op or a form that it has no formula for."""
    if op.is_local:
        return NOTHING
    refuse_public(op, "crypten")
    if type(op) not in PROGRAMS:
        raise UnpricedOpError(f"no program states the steps of {type(op).__name__}; add one to PROGRAMS.")
    return PROGRAMS[type(op)](op, setting)


def _unpriced(op: Op, why: str) -> UnpricedOpError:
    return UnpricedOpError(f"protocol crypten has no formula for {type(op).__name__} {why}; {OTHERS}.")


def _matmul(m: int, k: int, n: int, times: int = 1) -> Comm:
    return product(times * m * k, times * k * n)


def _embed(op: ops.TokenEmbedding, setting: CryptenSetting) -> Comm:
    one_hot = [is_zero(op.tokens * op.vocab)] if op.encoding == "lookup" else []
    return total_comm([*one_hot, _matmul(op.tokens, op.vocab, op.features)])


def _norm(op: ops.LayerNorm | ops.RmsNorm, setting: CryptenSetting) -> Comm:
    """Squares, whose mean is local; a row's inverse root, and products with it and the gain."""
    elements = op.rows * op.features
    gain = [product(elements, op.features)] if op.affine else []
    return total_comm([square(elements), inverse_root(op.rows), product(elements, op.rows), *gain])


def _softmax(op: ops.Softmax, setting: CryptenSetting) -> Comm:
    """Numbers of at least 0 for the scores, by form; then a row's sum, its reciprocal, and a product."""
    rows, elements = op.heads * op.queries, op.heads * op.queries * op.keys
    if op.form in ("2quad", "power8"):
        raise _unpriced(op, f"with `form` {op.form}, whose sums are beyond the range of its reciprocal")
    forms = {
        "exact": lambda: [maximum(rows, op.keys, setting.fraction_bits), exponential(elements)],
        "bounded": lambda: [exponential(elements)],
        "relu": lambda: [positive_part(elements)],
    }
    return total_comm([*forms[op.form](), reciprocal(rows), product(elements, rows)])


def _gelu(op: ops.Gelu, setting: CryptenSetting) -> Comm:
    elements = op.rows * op.features
    pair = product(elements, elements)
    if op.form == "exact":
        raise _unpriced(op, "with `form` exact, whose erf takes wrong powers in version 0.4.1")
    if op.form == "tanh":
        return total_comm([square(elements), pair, logistic(elements), pair])
    # x^2, then x^3 and x^4, then x^6; comparisons and selections of pieces
    powers = [square(elements), product(2 * elements, elements), pair]
    pieces = NUM_PIECES * elements
    return total_comm([*powers, is_negative(pieces), product(pieces, pieces)])


def _leaky_relu(op: ops.LeakyRelu, setting: CryptenSetting) -> Comm:
    elements = op.rows * op.features
    return total_comm([positive_part(elements), product(elements, 1)])


def _by_element(*steps: Callable[[int], Comm]) -> Formula:
    """The same steps for every element of the output."""
    return lambda op, setting: total_comm(step(prod(op.output_shape)) for step in steps)


def _pair(elements: int) -> Comm:
    return product(elements, elements)


def _local(op: Op, setting: CryptenSetting) -> Comm:
    return NOTHING


# op type -> its steps; an absent type that is not local is an error
PROGRAMS: dict[type, Formula] = {
    ops.TokenEmbedding: _embed,
    ops.PositionEmbedding: _local,
    ops.LayerNorm: _norm,
    ops.RmsNorm: _norm,
    ops.FrozenNorm: lambda op, setting: product(op.rows * op.features, op.features),
    ops.Linear: lambda op, setting: _matmul(op.rows, op.in_features, op.out_features),
    ops.Rotary: _local,
    ops.AttentionScores: lambda op, setting: _matmul(op.queries, op.head_dim, op.keys, op.heads),
    ops.Temperature: _local,
    ops.Softmax: _softmax,
    ops.ShapedAttention: _local,
    ops.AttentionMix: lambda op, setting: _matmul(op.queries, op.keys, op.head_dim, op.heads),
    ops.Gelu: _gelu,
    ops.Relu: _by_element(positive_part),
    ops.LeakyRelu: _leaky_relu,
    ops.Square: _by_element(square),
    ops.Silu: _by_element(logistic, _pair),
    ops.Sigmoid: _by_element(logistic),
    ops.Tanh: _by_element(logistic),
    ops.Multiply: _by_element(_pair),
    ops.Scale: _local,
    ops.ScaledAdd: lambda op, setting: total_comm([product(op.rows * op.features, 1)] * 2),
    ops.VocabProjection: lambda op, setting: _matmul(op.rows, op.features, op.vocab),
}
