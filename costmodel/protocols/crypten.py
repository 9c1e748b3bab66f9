"""The protocol `crypten`: additive shares of two parties, and a dealer who makes their correlated randomness.

Parties and dealer are semi-honest.

Bytes and rounds are exact: of the steps that CrypTen's tensors take when the op's function in `execution.op_functions`
asks them.

Weights are secret-shared; what `execution.interpreter` calls public is local, and so are truncations, which its two
parties make alone: one of them is wrong by 2^48 now and then, more often the larger the number. Only the mean squares
of norms are divided exactly, with the dealer's help. Exponentials, reciprocals and roots come out right in a range
alone (`engine.crypten_arrays`), which no price knows.

Source: Knott et al. 2021, CrypTen, https://arxiv.org/abs/2109.00984.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Literal, TypeAlias

from costmodel import ops
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Op
from costmodel.protocols.crypten_primitives import (
    exponential,
    inverse_root,
    is_negative,
    is_zero,
    logistic,
    maximum,
    mean_square,
    positive_part,
    product,
    reciprocal,
    square,
)
from costmodel.protocols.primitives import NOTHING, Comm, EngineSetting, refuse_public, total_comm

RING_BITS = 64  # arithmetic.py: shares are torch.long
MOST_FRACTION_BITS = 24  # of what a party encodes, in single precision
OTHERS = "choose protocol semi2k, aby3 or cheetah"
NUM_PIECES = 3  # thresholds of the piecewise GELU


@dataclass(frozen=True, kw_only=True, slots=True)
class CryptenSetting(EngineSetting):
    """Numbers modulo 2^64 with `fraction_bits` bits after the point, for a model whose weights are secret-shared.

    fraction_bits: 16, `precision_bits` of its configs/default.yaml.
    device: what parties compute on; `emulated` computes on the CPU as a GPU does, for tests.

    Raises UserError for another ring, a fraction that it cannot encode, weights that one party holds, masks of weights
    that are kept, or several threads.
    """

    formulas_of: ClassVar[str] = "CrypTen 0.4.1"

    fraction_bits: int = 16
    device: Literal["cpu", "cuda", "emulated"] = "cpu"

    @property
    def of_testbed(self) -> dict[str, int]:
        """What seconds depend on; the bits after the point change no step."""
        return {"threads": self.threads, "ring_bits": self.ring_bits}

    def __post_init__(self) -> None:
        only = {"weights": "secret", "weight_masks": "fresh", "ring_bits": RING_BITS, "threads": 1}
        for name, value in only.items():
            if (given := getattr(self, name)) != value:
                raise UserError(f"`{name}` must be {value} under protocol crypten, but got {given}; leave it out.")
        if not 1 <= self.fraction_bits <= MOST_FRACTION_BITS:
            raise UserError(
                f"`fraction_bits` must be from 1 to {MOST_FRACTION_BITS} under protocol crypten, which encodes numbers "
                f"of single precision, but got {self.fraction_bits}."
            )


Formula: TypeAlias = Callable[[Any, CryptenSetting], Comm]


def comm(op: Op, setting: CryptenSetting) -> Comm:
    """Return the rounds, messages and bytes of one op. Raises UserError for an op or a form without a formula.

    The dealer sends the client all that an op takes in one message, while the parties open numbers to each other.
    """
    if op.is_local:
        return NOTHING
    refuse_public(op, "crypten")
    if type(op) not in PROGRAMS:
        raise UnpricedOpError(f"no program states the steps of {type(op).__name__}; add one to PROGRAMS.")
    cost = PROGRAMS[type(op)](op, setting)
    from_dealer = int(cost.setup_bytes > 0)
    return replace(cost, messages=cost.messages + from_dealer, waited_bytes=max(cost.waited_bytes, cost.setup_bytes))


def _matmul(m: int, k: int, n: int, times: int = 1) -> Comm:
    return product(times * m * k, times * k * n, times * m * n)


def _embed(op: ops.TokenEmbedding, setting: CryptenSetting) -> Comm:
    one_hot = [is_zero(op.tokens * op.vocab)] if op.encoding == "lookup" else []
    return total_comm([*one_hot, _matmul(op.tokens, op.vocab, op.features)])


def _norm(op: ops.LayerNorm | ops.RmsNorm, setting: CryptenSetting) -> Comm:
    """The mean square of a row and its inverse root, and products with it and the gain."""
    elements, (roots, width) = op.rows * op.features, (op.rows, op.features)
    if isinstance(op, ops.RmsNorm):
        roots, width = op.num_roots, op.features // op.groups
    gain = [product(elements, width)] if op.affine else []
    return total_comm([mean_square(roots, elements // roots), inverse_root(roots), product(elements, roots), *gain])


def _softmax(op: ops.Softmax, setting: CryptenSetting) -> Comm:
    """Numbers of at least 0 for the scores, by form; then a row's sum, its reciprocal, and a product."""
    rows, elements = op.heads * op.queries, op.heads * op.queries * op.keys
    forms = {
        "exact": lambda: [maximum(rows, op.keys), exponential(elements)],
        "bounded": lambda: [exponential(elements)],
        "2quad": lambda: [square(elements)],
        "power8": lambda: [square(elements)] * 3,
        "relu": lambda: [positive_part(elements)],
    }
    return total_comm([*forms[op.form](), reciprocal(rows), product(elements, rows)])


def _gelu(op: ops.Gelu, setting: CryptenSetting) -> Comm:
    elements = op.rows * op.features
    pair = product(elements, elements)
    if op.form == "exact":
        why = "with `form` exact, whose erf takes wrong powers in version 0.4.1"
        raise UnpricedOpError(f"protocol crypten has no formula for Gelu {why}; {OTHERS}.")
    if op.form == "tanh":
        return total_comm([square(elements), pair, logistic(elements, bounded=True), pair])
    # x^2, then x^3 and x^4, then x^6; comparisons and selections of pieces
    powers = [square(elements), product(2 * elements, elements), pair]
    pieces = NUM_PIECES * elements
    return total_comm([*powers, is_negative(pieces), product(pieces, pieces)])


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
    ops.LeakyRelu: _by_element(positive_part, lambda elements: product(elements, 1)),
    ops.Square: _by_element(square),
    ops.Silu: _by_element(logistic, _pair),
    ops.Sigmoid: _by_element(logistic),
    ops.Tanh: _by_element(logistic),
    ops.Multiply: _by_element(_pair),
    ops.Scale: _local,
    ops.ScaledAdd: _by_element(*[lambda elements: product(elements, 1)] * 2),
    ops.VocabProjection: lambda op, setting: _matmul(op.rows, op.features, op.vocab),
}
