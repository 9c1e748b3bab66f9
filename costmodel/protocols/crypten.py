"""The protocol `crypten`: additive shares of two parties, and a dealer who makes their correlated randomness.

Parties and dealer are semi-honest.

Bytes and rounds are exact for the steps that CrypTen's tensors take when the op's function in `execution.op_functions`
runs on them. Numbers have 64 bits. A product opens both factors, masked, at once; a factor that is broadcast is opened
once. Parties draw their shares of masks from seeds that the dealer sent them; only the client's shares of products of
masks are sent. Bytes between the parties are `online_bytes`, those from the dealer `setup_bytes`; the headers of
messages are not counted.

Weights are secret-shared. Products with public numbers are local. So are truncations, since each party truncates its
share: with 16 fraction bits, a result is now and then wrong by 2^48 units in the last place, more often if it is large.
Only norms avoid it, with the dealer's help (`quotient`). Exponentials, reciprocals and roots are right only in a range
(`engine.crypten_arrays`), which does not affect their cost.

Sources: Knott et al. 2021, CrypTen, https://arxiv.org/abs/2109.00984; for every formula crypten 0.4.1,
https://github.com/facebookresearch/CrypTen, the files that functions name, as its configs/default.yaml sets them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Literal

from costmodel import ops
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Op
from costmodel.protocols.primitives import NOTHING, Comm, EngineSetting, refuse_public, total_comm

NUM_PARTIES = 2  # parties that compute; the dealer is not counted
DEALER = 2  # rank of the dealer's process, the third one
WORD_BYTES = 8
CARRY_LEVELS = 6  # circuit.py: log2 of 64 bits
EXPONENTIAL_SQUARINGS = 7
LOGISTIC_ITERATIONS = 2
# of reciprocals and inverse roots: exponents of the powers of 4 that x is compared with, number of Newton-Raphson steps
RECIPROCAL_POWERS, RECIPROCAL_ITERATIONS = range(-6, 9), 3
ROOT_POWERS, ROOT_ITERATIONS = range(-5, 9), 3
INVERSE_SCALE = 64  # factor of inverses, which keeps digits of the inverses of large numbers
MEAN_SCALE, ROOT_SCALE = 2**12, 8  # factors of mean squares and inverse roots, which keep digits of small numbers
WEIGHT_SCALE = 8  # factor of the weight matrices of linears, since weights are smaller than inputs


def opened(elements: int, dealt: int) -> Comm:
    """Return the cost of opening `elements` numbers to both parties, for which the dealer sends `dealt` numbers.

    Source: communicator.py, all_reduce.
    """
    sent, ahead = WORD_BYTES * elements, WORD_BYTES * dealt
    return Comm(rounds=1, messages=NUM_PARTIES, online_bytes=NUM_PARTIES * sent, setup_bytes=ahead, waited_bytes=sent)


def product(left: int, right: int, result: int | None = None) -> Comm:
    """Return the cost of a product of `left` and `right` elements: of matrices, or element-wise if `result` is None.

    `result` is the number of elements of the product of matrices. Source: beaver.py, __beaver_protocol and AND.
    """
    return opened(left + right, max(left, right) if result is None else result)


def _pair(elements: int) -> Comm:
    return product(elements, elements)


def square(elements: int) -> Comm:
    """Return the cost of `elements` squares, or of turning as many shared bits into arithmetic shares.

    Source: beaver.py, square and B2A_single_bit.
    """
    return opened(elements, elements)


def quotient(elements: int) -> Comm:
    """Return the cost of dividing `elements` numbers by a public number.

    Quotients are off by at most 2 units in the last place. Source: `costmodel.engine.crypten_arrays`, also where
    functions below name `crypten_arrays`.
    """
    return opened(elements, 2 * elements)


def is_negative(elements: int) -> Comm:
    """Return the cost of x < 0: both shares become bits, a tree of carries adds them, the top bit becomes arithmetic.

    Source: mpc.py, _ltz; converters.py; circuit.py, add and __SPK_circuit.
    """
    return total_comm([_pair(elements), *[_pair(2 * elements)] * CARRY_LEVELS, square(elements)])


def is_zero(elements: int) -> Comm:
    """Return the cost of x = 0, by comparing all bits of both shares.

    Source: mpc.py, _eqz_2PC; circuit.py, __P_circuit.
    """
    return total_comm([*[_pair(elements)] * CARRY_LEVELS, square(elements)])


def positive_part(elements: int) -> Comm:
    """Return the cost of max(x, 0). Source: logic.py, relu."""
    return total_comm([is_negative(elements), _pair(elements)])


def exponential(elements: int) -> Comm:
    """Return the cost of exp(x) as (1 + u + u^2 / 2)^(2^7), where u = x / 2^7.

    `crypten_arrays` computes this in place of CrypTen's (1 + x / 2^8)^(2^8).
    """
    return total_comm([square(elements)] * (1 + EXPONENTIAL_SQUARINGS))


def reciprocal(elements: int) -> Comm:
    """Return the cost of 1 / x for x > 0, by Newton-Raphson from x scaled to between 1/4 and 1.

    Comparisons with powers of 4 give the scale. `crypten_arrays` computes this in place of CrypTen's reciprocal, which
    uses an exponential.
    """
    products = 2 * RECIPROCAL_ITERATIONS + 2  # two of them by the power of 4
    return total_comm([is_negative(len(RECIPROCAL_POWERS) * elements), *[_pair(elements)] * products])


def inverse_root(elements: int) -> Comm:
    """Return the cost of 1 / sqrt(x), like `reciprocal` but scaled by a `quotient`. Source: `crypten_arrays`."""
    products = 3 * ROOT_ITERATIONS + 2  # two of them by powers
    comparisons = is_negative(len(ROOT_POWERS) * elements)
    return total_comm([comparisons, quotient(elements), *[_pair(elements)] * products])


def logistic(elements: int, *, bounded: bool = False) -> Comm:
    """Return the cost of the logistic function: r = 1 / (1 + exp(-|x|)), or 1 - r if x is negative.

    bounded: whether the exponential is set to 0 where |x| exceeds its range, by another comparison and product. Source:
        `crypten_arrays`.
    """
    pair = _pair(elements)
    sign = [is_negative(2 * elements), pair] if bounded else [is_negative(elements)]
    iterations = [square(elements), pair] * LOGISTIC_ITERATIONS
    return total_comm([*sign, pair, exponential(elements), *iterations, pair])


def maximum(rows: int, length: int) -> Comm:
    """Return the cost of the maxima of `rows` rows of `length` elements, by halving. Source: `crypten_arrays`."""
    parts, left = [], length
    while left > 1:
        parts.append(positive_part(rows * (left // 2)))
        left -= left // 2
    return total_comm(parts)


RING_BITS = 64  # arithmetic.py: shares are torch.long
LEAST_FRACTION_BITS = 12  # so that mean squares are divided by a whole number (`costmodel.engine.crypten_arrays`)
MOST_FRACTION_BITS = 24  # of the numbers of single precision that a party encodes
OTHERS = "choose protocol semi2k, aby3 or cheetah"
NUM_PIECES = 3  # number of thresholds of the piecewise GELU


@dataclass(frozen=True, kw_only=True, slots=True)
class CryptenSetting(EngineSetting):
    """Numbers modulo 2^64 with `fraction_bits` bits after the point, for a model whose weights are secret-shared.

    fraction_bits: By default 16, the `precision_bits` of CrypTen's configs/default.yaml.
    device: Where the parties compute: on CPUs, on GPUs (`cuda`), or, for tests, on CPUs as if on GPUs (`emulated`).

    Raises UserError for another ring, `fraction_bits` below 12 or above 24, weights that one party holds, reused masks,
    or another number of threads than 1.
    """

    formulas_of: ClassVar[str] = "CrypTen 0.4.1"

    fraction_bits: int = 16
    device: Literal["cpu", "cuda", "emulated"] = "cpu"

    @property
    def of_testbed(self) -> dict[str, int]:
        """Values, by field name, with which a testbed must have been measured; `fraction_bits` is not among them."""
        return {"threads": self.threads, "ring_bits": self.ring_bits}

    def __post_init__(self) -> None:
        only = {"weights": "secret", "weight_masks": "fresh", "ring_bits": RING_BITS, "threads": 1}
        for name, value in only.items():
            if (given := getattr(self, name)) != value:
                raise UserError(f"`{name}` must be {value} under protocol crypten, but got {given}; leave it out.")
        if not LEAST_FRACTION_BITS <= self.fraction_bits <= MOST_FRACTION_BITS:
            raise UserError(
                f"`fraction_bits` must be from {LEAST_FRACTION_BITS} to {MOST_FRACTION_BITS} under protocol crypten, "
                f"which encodes numbers of single precision, but got {self.fraction_bits}."
            )


def comm(op: Op, setting: CryptenSetting) -> Comm:
    """Return the rounds, messages and bytes of one op; a UserError is raised for public weights, or without a formula.

    The dealer sends the client all numbers for an op in one message, while the parties open numbers to each other.
    """
    if op.is_local:
        return NOTHING
    refuse_public(op, "crypten")
    if type(op) not in PROGRAMS:
        raise UnpricedOpError(f"no program states the steps of {type(op).__name__}; add one to PROGRAMS.")
    cost = total_comm(PROGRAMS[type(op)](op))
    from_dealer = int(cost.setup_bytes > 0)
    return replace(cost, messages=cost.messages + from_dealer, waited_bytes=max(cost.waited_bytes, cost.setup_bytes))


def _matmul(m: int, k: int, n: int, times: int = 1) -> list[Comm]:
    return [product(times * m * k, times * k * n, times * m * n)]


def _embed(op: ops.TokenEmbedding) -> list[Comm]:
    one_hot = [is_zero(op.tokens * op.vocab)] if op.encoding == "lookup" else []
    return [*one_hot, *_matmul(op.tokens, op.vocab, op.features)]


def _norm(op: ops.LayerNorm | ops.RmsNorm) -> list[Comm]:
    """Multiply each row by the inverse root of its mean square, and by the gain; the mean and bias are local."""
    elements, (roots, width) = op.rows * op.features, (op.rows, op.features)
    if isinstance(op, ops.RmsNorm):
        roots, width = op.num_roots, op.features // op.groups
    gain = [product(elements, width)] if op.affine else []
    return [square(elements), quotient(roots), inverse_root(roots), product(elements, roots), *gain]


def _softmax(op: ops.Softmax) -> list[Comm]:
    """Make the scores nonnegative, as the form says, and multiply each row by the reciprocal of its sum."""
    rows, elements = op.heads * op.queries, op.heads * op.queries * op.keys
    forms = {
        "exact": lambda: [maximum(rows, op.keys), exponential(elements)],
        "bounded": lambda: [exponential(elements)],
        "2quad": lambda: [square(elements)],
        "power8": lambda: [square(elements)] * 3,
        "relu": lambda: [positive_part(elements)],
    }
    return [*forms[op.form](), reciprocal(rows), product(elements, rows)]


def _gelu(op: ops.Gelu) -> list[Comm]:
    elements = op.rows * op.features
    if op.form == "exact":
        why = "with `form` exact, whose erf takes wrong powers in version 0.4.1"
        raise UnpricedOpError(f"protocol crypten has no formula for Gelu {why}; {OTHERS}.")
    if op.form == "tanh":
        return [square(elements), _pair(elements), logistic(elements, bounded=True), _pair(elements)]
    # x^2, then x^3 and x^4, then x^6; comparisons and selections of pieces
    powers = [square(elements), product(2 * elements, elements), _pair(elements)]
    return [*powers, is_negative(NUM_PIECES * elements), _pair(NUM_PIECES * elements)]


def _by_element(*steps: Callable[[int], Comm]) -> Callable[[Any], list[Comm]]:
    """Return the formula that applies the same steps to every element of an op's output."""
    return lambda op: [step(prod(op.output_shape)) for step in steps]


def _by_scalar(elements: int) -> Comm:
    return product(elements, 1)


# op type -> its steps; an absent type that is not local is an error
PROGRAMS: dict[type, Callable[[Any], list[Comm]]] = {
    **dict.fromkeys(
        (ops.PositionEmbedding, ops.Rotary, ops.Temperature, ops.ShapedAttention, ops.Scale), _by_element()
    ),
    ops.TokenEmbedding: _embed,
    ops.LayerNorm: _norm,
    ops.RmsNorm: _norm,
    ops.FrozenNorm: lambda op: [product(op.rows * op.features, op.features)],
    ops.Linear: lambda op: _matmul(op.rows, op.in_features, op.out_features),
    ops.AttentionScores: lambda op: _matmul(op.queries, op.head_dim, op.keys, op.heads),
    ops.Softmax: _softmax,
    ops.AttentionMix: lambda op: _matmul(op.queries, op.keys, op.head_dim, op.heads),
    ops.Gelu: _gelu,
    ops.Relu: _by_element(positive_part),
    ops.LeakyRelu: _by_element(positive_part, _by_scalar),
    ops.Square: _by_element(square),
    ops.Silu: _by_element(logistic, _pair),
    ops.Sigmoid: _by_element(logistic),
    ops.Tanh: _by_element(logistic),
    ops.Multiply: _by_element(_pair),
    ops.ScaledAdd: _by_element(_by_scalar, _by_scalar),
    ops.VocabProjection: lambda op: _matmul(op.rows, op.features, op.vocab),
}
