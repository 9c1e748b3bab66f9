"""GELU by polynomials between thresholds: comparisons and products, but no exponential and no division.

    gelu(x) = 0 below -5,  cubic(x) below -1.97,  x / 2 + even(x) below 3,  x above

Thresholds and degrees are BumbleBee's (Lu et al. 2023, https://eprint.iacr.org/2023/1678); the coefficients are fitted
here. GELU minus x / 2 is an even function, hence the even polynomial, of degree 6. The greatest error is 0.0104, at
x = 2.72.
"""

from math import erf, sqrt
from typing import Any

import numpy as np

THRESHOLDS = (-5.0, -1.97, 3.0)
CUBIC_POWERS, EVEN_POWERS = (0, 1, 2, 3), (0, 2, 4, 6)
# Coefficients are multiples of the least number the engine holds at its default of 18 fraction bits: one that is off by
# half of it moves 3^6 times as much at x = 3, 0.0014.
STEP = 2.0**-18
NUM_POINTS = 1001


def gelu(source: Any) -> Any:
    """GELU itself, of an array, in double precision."""
    return source * (np.vectorize(erf)(source / sqrt(2)) * 0.5 + 0.5)


def fitted(low: float, high: float, powers: tuple[int, ...], linear: float) -> tuple[float, ...]:
    """Coefficients whose polynomial, plus linear * x, is nearest to GELU in least squares on Chebyshev's points.

    From the highest power down, each is rounded to a multiple of STEP before those below it are fitted again.
    """
    angles = np.pi * (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS
    points = (low + high) / 2 + (high - low) / 2 * np.cos(angles)  # denser at the ends, where errors grow
    rest = gelu(points) - linear * points
    found: list[float] = []
    for count in range(len(powers), 0, -1):
        columns = points[:, None] ** np.array(powers[:count])
        highest = float(np.linalg.lstsq(columns, rest, rcond=None)[0][-1])
        found.insert(0, round(highest / STEP) * STEP)
        rest = rest - found[0] * points ** powers[count - 1]
    return tuple(found)


CUBIC = fitted(*THRESHOLDS[:2], CUBIC_POWERS, linear=0.0)
EVEN = fitted(*THRESHOLDS[1:], EVEN_POWERS, linear=0.5)
