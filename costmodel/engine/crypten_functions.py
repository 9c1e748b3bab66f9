"""Replacements for CrypTen's own tensor functions, which are less accurate on models' values, or cost more.

The ranges and errors are for 16 fraction bits. Outside of its range, a result may be wrong by any amount, so a model is
checked before it runs (`costmodel.execution.arithmetic`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from costmodel.engine.assignment import CLIENT
from costmodel.execution.op_functions import GELU_TANH_CUBIC
from costmodel.protocols.crypten import (
    EXPONENTIAL_SQUARINGS,
    INVERSE_SCALE,
    LOGISTIC_ITERATIONS,
    MEAN_SCALE,
    RECIPROCAL_ITERATIONS,
    RECIPROCAL_POWERS,
    ROOT_ITERATIONS,
    ROOT_POWERS,
    ROOT_SCALE,
)

RECIPROCAL_SLOPE = 128 / 41  # of the line, which is off by 9 / 41 of 1 / y at most
ROOT_SLOPE = 2 / (3 / 4 + (7 / 6) * (7 / 12) ** 0.5)  # likewise, by 9 % of 1 / sqrt(y)
MOST_SIGNED = 2**63 - 1
GELU_BOUND = 14.0  # there, twice the argument of tanh is 218


def exponential(x: Any, within: Any = 1) -> Any:
    """Return exp(x) for x from -256 to 1, with a relative error of 0.002, mostly from squaring in fixed point.

    CrypTen's (1 + x / 256)^256 is off by twice that, and by a further 0.001. Where the bits `within` are 0, return 0.
    """
    u = x.div(2**EXPONENTIAL_SQUARINGS)
    result = (u.square().div(2) + u + 1) * within
    for _ in range(EXPONENTIAL_SQUARINGS):
        result = result.square()
    return result


def logistic(x: Any) -> Any:
    """Return the logistic function for x from -256 to 256, off by at most 0.001; CrypTen's is off by 0.004 around 0."""
    return _logistic(x, x._ltz())


def gelu(x: Any) -> Any:
    """Return GELU by tanh, off by at most 0.001; beyond `GELU_BOUND`, the exponential is out of range and set to 0."""
    squares = x.square()
    bits = type(x).stack([x, squares - GELU_BOUND**2])._ltz()
    slope = (2 / np.pi) ** 0.5
    inner = x * (squares * (GELU_TANH_CUBIC * slope) + slope)
    return x * _logistic(inner * 2, bits[0], bits[1])


def _logistic(x: Any, negative: Any, within: Any = 1) -> Any:
    """Return the logistic function by Newton-Raphson from the best line for 1 / d on [1, 2], off by 1 / 17 of it."""
    sign = 1 - 2 * negative
    denominator = exponential(-(x * sign), within) + 1
    inverse = denominator * (-8 / 17) + 24 / 17
    for _ in range(LOGISTIC_ITERATIONS):
        inverse = inverse * 2 - inverse.square() * denominator
    return inverse * sign + negative


def reciprocal(x: Any) -> Any:
    """Return INVERSE_SCALE / x for x from 2^-14 to 2^18; CrypTen's 1 / x is right from 1 to 600.

    x is scaled to y from 1/4 to 1, and 1 / y refined by Newton-Raphson from the best line for it there.
    """
    (scale,) = _by_interval(x, RECIPROCAL_POWERS, [lambda power: INVERSE_SCALE * 4.0**-power])
    y = (x * scale).div(INVERSE_SCALE)
    inverse = y * -RECIPROCAL_SLOPE + 1.25 * RECIPROCAL_SLOPE
    for _ in range(RECIPROCAL_ITERATIONS):
        inverse = inverse * (2 - y * inverse)
    return inverse * scale


def inverse_root(x: Any) -> Any:
    """Return ROOT_SCALE / sqrt(m) for x = MEAN_SCALE * m and m from 2^-12 to 2^18; CrypTen's is right from 0.1 to 170.

    m is scaled to y from 1/4 to 1, exactly, and 1 / sqrt(y) refined by Newton-Raphson from the best line for it there.
    """
    from crypten.mpc.primitives import beaver

    top = ROOT_POWERS[-1] + 1
    guesses = [lambda power: 4.0 ** (top - power) / x.encoder.scale, lambda power: ROOT_SCALE * 2.0**-power]
    factor, scale = _by_interval(x, ROOT_POWERS, guesses, MEAN_SCALE)
    y = _quotient(x, beaver.mul(x._tensor, factor._tensor).share, 4**top * MEAN_SCALE)
    root = y * -ROOT_SLOPE + 1.75 * ROOT_SLOPE
    for _ in range(ROOT_ITERATIONS):
        root = (root * (3 - y * root * root)).div(2)
    return root * scale


def _by_interval(x: Any, powers: range, guesses: Sequence[Callable[[int], float]], unit: int = 1) -> list[Any]:
    """Return every guess for k where x / unit is from 4^(k-1) to 4^k; bits of comparisons choose it."""
    device, chosen = x.share.device, []
    ends = torch.tensor([4.0**power * unit for power in powers], device=device).reshape(-1, *[1] * x.dim())
    below = (type(x).stack([x] * len(powers)) - ends)._ltz()
    for guess in guesses:
        values = np.array([guess(power) for power in (*powers, powers[-1] + 1)])
        steps = torch.tensor(np.rint((values[:-1] - values[1:]) * x.encoder.scale), dtype=torch.int64, device=device)
        chosen.append(type(x).from_shares((below.share * steps.reshape(ends.shape)).sum(0)) + float(values[-1]))
    return chosen


def mean_square(x: Any) -> Any:
    """Return MEAN_SCALE times the mean square over the last dimension, kept. Sums of squares are divided exactly."""
    from crypten.mpc.primitives import beaver

    sums = beaver.square(x._tensor).sum(-1, keepdim=True).share
    return _quotient(x, sums, x.size(-1) * x.encoder.scale // MEAN_SCALE)


def _quotient(x: Any, numbers: Tensor, divisor: int) -> Any:
    """Return a tensor like x, of quotients of integers from 0 to 2^63, off by at most 2.

    A number s is opened plus a mask r, of which the dealer shares the quotient and the top bit: s + r wraps around 2^64
    exactly if r has that bit and s + r has not.
    Source: Dalskov, Escudero and Keller 2019, https://arxiv.org/abs/1910.12435, section 3.2.2.
    """
    import crypten

    link, provider = crypten.communicator.get(), crypten.mpc.get_default_provider()
    mask, dealt = provider.shares("quotients", numbers.shape, arguments=(divisor,))
    opened = link.all_reduce(numbers + mask)
    share = dealt[1] * (opened >= 0) * round(2**64 / divisor) - dealt[0]
    if link.get_rank() == CLIENT:
        share += unsigned_quotient(opened, divisor)
    return type(x).from_shares(share)


def unsigned_quotient(numbers: Tensor, divisor: int) -> Tensor:
    """Return the quotients, rounded down, of integers of 64 bits that are taken as unsigned."""
    halves = (numbers >> 1) & MOST_SIGNED
    return halves // divisor * 2 + (halves % divisor * 2 + (numbers & 1)) // divisor


def maximum(x: Any) -> Any:
    """Return the maximum over the last dimension, kept, by halves. CrypTen also finds its index, for 3x the bytes."""
    while (length := x.size(-1)) > 1:
        half = length // 2
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        larger = first + (second - first).relu()
        x = type(x).cat([larger, rest], dim=-1) if length % 2 else larger
    return x
