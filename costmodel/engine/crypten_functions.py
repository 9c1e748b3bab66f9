"""Replacements for CrypTen's own tensor functions, which are less accurate on models' values, or cost more.

Range and error of each with 16 fraction bits; beyond a range results are wrong by any amount, so that a model is
checked before it is run (`nas.private.crypten_check`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from costmodel.execution.op_functions import GELU_TANH_CUBIC
from costmodel.protocols.crypten_primitives import (
    EXPONENTIAL_SQUARINGS,
    LOGISTIC_ITERATIONS,
    RECIPROCAL_ITERATIONS,
    RECIPROCAL_POWERS,
    ROOT_ITERATIONS,
    ROOT_POWERS,
)

GELU_BOUND = 14.0  # where twice what tanh is taken of is 218


def exponential(x: Any, within: Any = 1) -> Any:
    """From -256 to 1 off by 0.002 of it, most of which fixed point adds in squaring.

    CrypTen's (1 + x / 256)^256 is off by twice that, and by 0.001 beside it. within: bits, where not to return 0.
    """
    u = x.div(2**EXPONENTIAL_SQUARINGS)
    result = (u.square().div(2) + u + 1) * within
    for _ in range(EXPONENTIAL_SQUARINGS):
        result = result.square()
    return result


def logistic(x: Any) -> Any:
    """From -256 to 256 off by at most 0.001, where CrypTen's is by 0.004 around 0."""
    return _logistic(x, x._ltz())


def gelu(x: Any) -> Any:
    """By tanh, off by at most 0.001 for any x: beyond `GELU_BOUND` the exponential is out of its range, and made 0."""
    squares = x.square()
    bits = type(x).stack([x, squares - GELU_BOUND**2])._ltz()
    slope = (2 / np.pi) ** 0.5
    inner = x * (squares * (GELU_TANH_CUBIC * slope) + slope)
    return x * _logistic(inner * 2, bits[0], bits[1])


def _logistic(x: Any, negative: Any, within: Any = 1) -> Any:
    """Newton and Raphson from the best line for 1 / d between 1 and 2, off by 1 / 17 of it."""
    sign = 1 - 2 * negative
    denominator = exponential(-(x * sign), within) + 1
    inverse = denominator * (-8 / 17) + 24 / 17
    for _ in range(LOGISTIC_ITERATIONS):
        inverse = inverse * 2 - inverse.square() * denominator
    return inverse * sign + negative


def reciprocal(x: Any) -> Any:
    """From 2^-9 to 2^12, to 2^-15; CrypTen's own is from 1 to 600. Newton and Raphson from a guess by intervals."""
    inverse = _by_interval(x, RECIPROCAL_POWERS, lambda power: 1.6 * 4.0**-power)
    for _ in range(RECIPROCAL_ITERATIONS):
        inverse = inverse * (2 - x * inverse)
    return inverse


def inverse_root(x: Any) -> Any:
    """From 2^-12 to 2^16, to 2^-15; CrypTen's own is right to 1 % from 0.1 to 170 alone. As `reciprocal`."""
    root = _by_interval(x, ROOT_POWERS, lambda power: 2.0**0.5 * 2.0**-power)
    for _ in range(ROOT_ITERATIONS):
        root = (root * (3 - x * root * root)).div(2)
    return root


def _by_interval(x: Any, powers: range, guess: Callable[[int], float]) -> Any:
    """The guess of k where x is from 4^(k-1) to 4^k, which bits of comparisons choose."""
    guesses = np.array([guess(power) for power in (*powers, powers[-1] + 1)])
    device = x.share.device
    ends = torch.tensor([4.0**power for power in powers], device=device).reshape(-1, *[1] * x.dim())
    below = (type(x).stack([x] * len(powers)) - ends)._ltz()
    steps = torch.tensor(np.rint((guesses[:-1] - guesses[1:]) * x.encoder.scale), dtype=torch.int64, device=device)
    return type(x).from_shares((below.share * steps.reshape(ends.shape)).sum(0)) + float(guesses[-1])


def maximum(x: Any) -> Any:
    """Of the last dimension, which stays, by halves. CrypTen's finds its place too, for three times as many bytes."""
    while (length := x.size(-1)) > 1:
        half = length // 2
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        larger = first + (second - first).relu()
        x = type(x).cat([larger, rest], dim=-1) if length % 2 else larger
    return x
