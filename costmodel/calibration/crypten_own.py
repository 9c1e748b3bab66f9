"""What functions of CrypTen's own cost, which ours stand in for, and which others ran: bytes between the parties.

Source of every formula: crypten 0.4.1, https://github.com/facebookresearch/CrypTen, the files that functions name, as
its configs/default.yaml sets them.
"""

from math import log

from costmodel import ops
from costmodel.protocols.crypten_primitives import (
    from_bit,
    is_negative,
    is_zero,
    product,
    square,
)
from costmodel.protocols.primitives import Comm, total_comm

FRACTION_BITS = 16  # precision_bits
RECIPROCAL_ITERATIONS = 10  # reciprocal_nr_iters
ROOT_ITERATIONS = 3  # sqrt_nr_iters
LOGISTIC_ITERATIONS = 3  # approximations.py, sigmoid, of which the first starts from a public number


def exponential(elements: int) -> Comm:
    """(1 + x / 2^8)^(2^8). Source: approximations.py, exp."""
    return total_comm([square(elements)] * 8)


def layer_norm(op: ops.LayerNorm) -> Comm:
    """With inverse roots by Newton and Raphson from an exponential. Source: approximations.py, inv_sqrt."""
    elements = op.rows * op.features
    pair = product(op.rows, op.rows)
    root = [exponential(op.rows), *[square(op.rows), pair, pair] * ROOT_ITERATIONS]
    return total_comm([square(elements), *root, product(elements, op.rows), product(elements, op.features)])


def silu(op: ops.Silu) -> Comm:
    """x times its logistic: 1 / (1 + exp(-|x|)), or 1 minus it by the sign of x. Source: approximations.py, sigmoid."""
    elements = op.rows * op.features
    pair = product(elements, elements)
    inverse = [square(elements), pair] * (LOGISTIC_ITERATIONS - 1)
    return total_comm([is_negative(elements), pair, exponential(elements), *inverse, pair, pair, pair])


def softmax(op: ops.Softmax) -> Comm:
    """Source: approximations.py, softmax."""
    rows, elements = op.heads * op.queries, op.heads * op.queries * op.keys
    inverse = [exponential(rows), *[square(rows), product(rows, rows)] * RECIPROCAL_ITERATIONS]
    return total_comm([_maximum(rows, op.keys), exponential(elements), *inverse, product(elements, rows)])


def _maximum(rows: int, length: int) -> Comm:
    """The maximum of each row: by halves, then all pairs of what is left; and where it is, by a draw among equals.

    Source: maximum.py, _max_helper_log_reduction, _argmax_helper_pairwise and _argmax_helper.
    """
    parts, left = [], length
    for _ in range(int(log(length))):
        pairs = rows * (left // 2)
        parts += [is_negative(pairs), *[product(pairs, pairs)] * 2]
        left -= left // 2
    unfolded = max(left, 2) - 1
    parts.append(is_negative(rows * left * unfolded))
    while unfolded > 1:
        parts.append(product(rows * left * (unfolded // 2), rows * left * (unfolded // 2)))
        unfolded -= unfolded // 2
    pick = [_drawn(rows, left), product(rows * left, rows * left)]
    return total_comm([*parts, *pick, is_zero(rows * length), _drawn(rows, length)])


def _drawn(rows: int, length: int) -> Comm:
    """One of a row's entries by a random number of so many bits. Source: sampling.py, weighted_index; mpc.py, rand."""
    return total_comm([from_bit(rows * FRACTION_BITS), product(rows, rows), is_negative(rows * length)])
