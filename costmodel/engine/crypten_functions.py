"""Functions of CrypTen's tensors that stand in for its own, which are worse on what models compute, or dearer.

Range and error of each with 16 fraction bits; beyond a range results are wrong by any amount, so that a model is
checked before it is run (`nas.private.crypten_check`).
"""

from typing import Any

import numpy as np
import torch

from costmodel.protocols.crypten_primitives import (
    EXPONENTIAL_SQUARINGS,
    LOGISTIC_ITERATIONS,
    RECIPROCAL_ITERATIONS,
    ROOT_ITERATIONS,
    ROOT_POWERS,
)


def exponential(x: Any) -> Any:
    """From -256 to 1 off by 0.002 of it, most of which fixed point adds in squaring.

    CrypTen's (1 + x / 256)^256 is off by twice that, and by 0.001 beside it.
    """
    u = x.div(2**EXPONENTIAL_SQUARINGS)
    result = u.square().div(2) + u + 1
    for _ in range(EXPONENTIAL_SQUARINGS):
        result = result.square()
    return result


def logistic(x: Any) -> Any:
    """From -256 to 256 off by at most 0.001, where CrypTen's is by 0.004 around 0.

    Newton and Raphson from the best line for 1 / d between 1 and 2, off by 1 / 17 of it.
    """
    negative = x._ltz()
    sign = 1 - 2 * negative
    denominator = exponential(-(x * sign)) + 1
    inverse = denominator * (-8 / 17) + 24 / 17
    for _ in range(LOGISTIC_ITERATIONS):
        inverse = inverse * 2 - inverse.square() * denominator
    return inverse * sign + negative


def reciprocal(x: Any) -> Any:
    """From 0.002 to 600, to 2^-15: CrypTen's own, with the exponential of here."""
    result = exponential(1 - 2 * x) * 3 + 0.003
    for _ in range(RECIPROCAL_ITERATIONS):
        result = result * 2 - result.square() * x
    return result


def inverse_root(x: Any) -> Any:
    """From 2^-12 to 2^16, to 2^-15; CrypTen's own is right to 1 % from 0.1 to 170 alone.

    Bits of comparisons with powers of 4 choose the first guess: for x from 4^(k-1) to 4^k, the root of 2 / 4^k.
    """
    guesses = np.array([2.0**0.5 * 2.0**-power for power in (*ROOT_POWERS, ROOT_POWERS[-1] + 1)])
    powers = torch.tensor([4.0**power for power in ROOT_POWERS]).reshape(-1, *[1] * x.dim())
    below = (type(x).stack([x] * len(ROOT_POWERS)) - powers)._ltz()
    steps = torch.tensor(np.rint((guesses[:-1] - guesses[1:]) * x.encoder.scale), dtype=torch.int64)
    root = type(x).from_shares((below.share * steps.reshape(powers.shape)).sum(0)) + float(guesses[-1])
    for _ in range(ROOT_ITERATIONS):
        root = (root * (3 - x * root * root)).div(2)
    return root


def maximum(x: Any) -> Any:
    """Of the last dimension, which stays, by halves. CrypTen's finds its place too, for six times as many bytes."""
    while (length := x.size(-1)) > 1:
        half = length // 2
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        larger = first + (second - first).relu()
        x = type(x).cat([larger, rest], dim=-1) if length % 2 else larger
    return x
