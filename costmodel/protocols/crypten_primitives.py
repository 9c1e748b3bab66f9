"""What the steps of protocol `crypten` cost: numbers of 64 bits that two parties open to each other.

A product opens both factors, masked, at once; a factor that is broadcast is opened once. Its masks cost nothing: the
first party draws them, and the other's shares come from a seed that both have. Between two parties a truncation is
local, and so are products with public numbers.

Source of every formula: crypten 0.4.1, https://github.com/facebookresearch/CrypTen, the files that functions name, as
its configs/default.yaml sets them. Bytes and rounds are those of its own communicator, to the byte.
"""

from math import log

from costmodel.protocols.primitives import Comm, total_comm

NUM_PARTIES = 2
WORD_BYTES = 8
CARRY_LEVELS = 6  # circuit.py: log2 of 64 bits
EXPONENTIAL_SQUARINGS = 8  # exp_iterations
RECIPROCAL_ITERATIONS = 10  # reciprocal_nr_iters
ROOT_ITERATIONS = 3  # sqrt_nr_iters
LOGISTIC_ITERATIONS = 3  # approximations.py, sigmoid, of which the first starts from a public number


def opened(elements: int) -> Comm:
    """Both parties send their shares of so many numbers, at once. Source: communicator.py, all_reduce."""
    sent = WORD_BYTES * elements
    return Comm(rounds=1, messages=NUM_PARTIES, online_bytes=NUM_PARTIES * sent, waited_bytes=sent)


def product(left: int, right: int) -> Comm:
    """A product of factors of so many elements, by element or of matrices. Source: beaver.py, __beaver_protocol."""
    return opened(left + right)


def square(elements: int) -> Comm:
    """Source: beaver.py, square."""
    return opened(elements)


def is_negative(elements: int) -> Comm:
    """The sign: both shares as bits, added by a tree of carries; and back from a bit.

    Source: mpc.py, _ltz; converters.py; circuit.py, add and __SPK_circuit.
    """
    carries = [product(2 * elements, 2 * elements)] * CARRY_LEVELS
    return total_comm([product(elements, elements), *carries, opened(elements)])


def is_zero(elements: int) -> Comm:
    """Whether all bits of both shares are equal. Source: mpc.py, _eqz_2PC; circuit.py, __P_circuit."""
    return total_comm([*[product(elements, elements)] * CARRY_LEVELS, opened(elements)])


def selected(elements: int) -> Comm:
    """One of two numbers by a bit, a product each. Source: logic.py, where."""
    return total_comm([product(elements, elements)] * 2)


def positive_part(elements: int) -> Comm:
    """Source: logic.py, relu."""
    return total_comm([is_negative(elements), product(elements, elements)])


def exponential(elements: int) -> Comm:
    """(1 + x / 2^8)^(2^8). Source: approximations.py, exp."""
    return total_comm([square(elements)] * EXPONENTIAL_SQUARINGS)


def reciprocal(elements: int) -> Comm:
    """Reciprocals of positive numbers, by Newton and Raphson from an exponential. Source: approximations.py."""
    step = [square(elements), product(elements, elements)]
    return total_comm([exponential(elements), *step * RECIPROCAL_ITERATIONS])


def inverse_root(elements: int) -> Comm:
    """Inverse roots by Newton and Raphson from an exponential. Source: approximations.py, inv_sqrt."""
    step = [square(elements), product(elements, elements), product(elements, elements)]
    return total_comm([exponential(elements), *step * ROOT_ITERATIONS])


def logistic(elements: int) -> Comm:
    """1 / (1 + exp(-|x|)), or 1 minus it by the sign of x. Source: approximations.py, sigmoid."""
    pair = product(elements, elements)
    step = [square(elements), pair]
    inverse = step * (LOGISTIC_ITERATIONS - 1)
    return total_comm([is_negative(elements), pair, exponential(elements), *inverse, selected(elements)])


def maximum(rows: int, length: int, fraction_bits: int) -> Comm:
    """The maximum of each row: by halves, then all pairs of what is left; and where it is, by a draw among equals.

    Source: maximum.py, _max_helper_log_reduction, _argmax_helper_pairwise and _argmax_helper.
    """
    parts, left = [], length
    for _ in range(int(log(length))):
        pairs = rows * (left // 2)
        parts += [is_negative(pairs), selected(pairs)]
        left -= left // 2
    unfolded = max(left, 2) - 1
    parts.append(is_negative(rows * left * unfolded))
    while unfolded > 1:
        parts.append(product(rows * left * (unfolded // 2), rows * left * (unfolded // 2)))
        unfolded -= unfolded // 2
    pick = [_drawn(rows, left, fraction_bits), product(rows * left, rows * left)]
    return total_comm([*parts, *pick, is_zero(rows * length), _drawn(rows, length, fraction_bits)])


def _drawn(rows: int, length: int, fraction_bits: int) -> Comm:
    """One of a row's entries by a random number of so many bits. Source: sampling.py, weighted_index; mpc.py, rand."""
    return total_comm([opened(rows * fraction_bits), product(rows, rows), is_negative(rows * length)])
