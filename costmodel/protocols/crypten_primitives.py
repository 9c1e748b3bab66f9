"""What the steps of protocol `crypten` cost: numbers of 64 bits that two parties open to each other.

A product opens both factors, masked, at once; a factor that is broadcast is opened once. Parties draw their masks from
seeds that the dealer sent them, but for the client's share of a product of masks, which the dealer sends. Between two
parties a truncation is local, and so are products with public numbers.

Source of every formula: crypten 0.4.1, https://github.com/facebookresearch/CrypTen, the files that functions name, as
its configs/default.yaml sets them. Bytes between the parties are `online_bytes`, those from the dealer
`setup_bytes`; frames about them are not counted.
"""

from costmodel.protocols.primitives import Comm, total_comm

NUM_PARTIES = 2  # that compute
DEALER = 2  # the rank of the third process
WORD_BYTES = 8
CARRY_LEVELS = 6  # circuit.py: log2 of 64 bits
EXPONENTIAL_SQUARINGS = 7
LOGISTIC_ITERATIONS = 2
# of inverses and their roots: the intervals between powers of 4 that are told apart, and how often results are refined
RECIPROCAL_POWERS, RECIPROCAL_ITERATIONS = range(-6, 9), 3
ROOT_POWERS, ROOT_ITERATIONS = range(-5, 9), 3
INVERSE_SCALE = 64  # keeps digits of the inverses of large numbers
MEAN_SCALE, ROOT_SCALE = 2**12, 8  # keep digits of small mean squares, and of the inverse roots of large ones
WEIGHT_SCALE = 8  # of matrices of linears, as weights are smaller than inputs


def opened(elements: int) -> Comm:
    """Return the cost of opening numbers: both parties send their shares at once.

    Source: communicator.py, all_reduce.
    """
    sent = WORD_BYTES * elements
    return Comm(rounds=1, messages=NUM_PARTIES, online_bytes=NUM_PARTIES * sent, waited_bytes=sent)


def dealt(words: int) -> Comm:
    """Return the cost of `words` numbers that the dealer sends the client ahead, in the one message of an op."""
    return Comm(rounds=0, messages=0, online_bytes=0, setup_bytes=WORD_BYTES * words, waited_bytes=0)


def product(left: int, right: int, result: int | None = None) -> Comm:
    """Return the cost of a product of `left` and `right` elements: by element, or of matrices if `result` is given.

    Source: beaver.py, __beaver_protocol and AND.
    """
    return total_comm([dealt(max(left, right) if result is None else result), opened(left + right)])


def square(elements: int) -> Comm:
    """Return the cost of squares. Source: beaver.py, square."""
    return total_comm([dealt(elements), opened(elements)])


def quotient(elements: int) -> Comm:
    """Return the cost of quotients by a public number, off by at most 2 units in the last place.

    Source: `crypten_arrays`.
    """
    return total_comm([dealt(2 * elements), opened(elements)])


def mean_square(rows: int, length: int) -> Comm:
    """Return the cost of mean squares of rows, whose sums are divided by `quotient`. Source: `crypten_arrays`."""
    return total_comm([square(rows * length), quotient(rows)])


def from_bit(elements: int) -> Comm:
    """Return the cost of converting bits from boolean to arithmetic shares. Source: beaver.py, B2A_single_bit."""
    return total_comm([dealt(elements), opened(elements)])


def is_negative(elements: int) -> Comm:
    """Return the cost of signs: both shares become bits, are added by a tree of carries, and the sign is turned back.

    Source: mpc.py, _ltz; converters.py; circuit.py, add and __SPK_circuit.
    """
    carries = [product(2 * elements, 2 * elements)] * CARRY_LEVELS
    return total_comm([product(elements, elements), *carries, from_bit(elements)])


def is_zero(elements: int) -> Comm:
    """Return the cost of comparisons with 0, over all bits of both shares.

    Source: mpc.py, _eqz_2PC; circuit.py, __P_circuit.
    """
    return total_comm([*[product(elements, elements)] * CARRY_LEVELS, from_bit(elements)])


def positive_part(elements: int) -> Comm:
    """Return the cost of max(x, 0). Source: logic.py, relu."""
    return total_comm([is_negative(elements), product(elements, elements)])


def exponential(elements: int) -> Comm:
    """Return the cost of (1 + u + u^2 / 2)^(2^7), u = x / 2^7.

    `crypten_arrays` computes this in place of CrypTen's (1 + x / 2^8)^(2^8).
    """
    return total_comm([square(elements)] * (1 + EXPONENTIAL_SQUARINGS))


def reciprocal(elements: int) -> Comm:
    """Return the cost of 1 / x for x > 0: scaled to 1/4 to 1 by comparisons with powers of 4, then Newton-Raphson.

    `crypten_arrays` computes this in place of CrypTen's reciprocal, which uses an exponential.
    """
    products = 2 * RECIPROCAL_ITERATIONS + 2  # two of them by the power of 4
    return total_comm([is_negative(len(RECIPROCAL_POWERS) * elements), *[product(elements, elements)] * products])


def inverse_root(elements: int) -> Comm:
    """Return the cost of 1 / sqrt(x), computed as `reciprocal` but with exact scaling. Source: `crypten_arrays`."""
    products = 3 * ROOT_ITERATIONS + 2  # two of them by powers
    comparisons = is_negative(len(ROOT_POWERS) * elements)
    return total_comm([comparisons, quotient(elements), *[product(elements, elements)] * products])


def logistic(elements: int, *, bounded: bool = False) -> Comm:
    """Return the cost of r = 1 / (1 + exp(-|x|)), or 1 - r, by the sign of x. Source: `crypten_arrays`.

    bounded: whether numbers may exceed the range of the exponential, which takes another comparison and a product.
    """
    pair = product(elements, elements)
    sign = [is_negative(2 * elements), pair] if bounded else [is_negative(elements)]
    iterations = [square(elements), pair] * LOGISTIC_ITERATIONS
    return total_comm([*sign, pair, exponential(elements), *iterations, pair])


def maximum(rows: int, length: int) -> Comm:
    """Return the cost of the maximum of each row, by halving. Source: `crypten_arrays`."""
    parts, left = [], length
    while left > 1:
        parts.append(positive_part(rows * (left // 2)))
        left -= left // 2
    return total_comm(parts)
