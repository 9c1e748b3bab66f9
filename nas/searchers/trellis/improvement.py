"""How much a new point is expected to add to a front, where its price is known and its loss is normal: closed form.

What a point of loss y at price t adds is the area between y and the staircase of the front, from t to the reference. So
its expectation is a sum, over the steps of the staircase beyond t, of their width times the expected improvement on
their height.

Source: Emmerich, Giannakoglou and Naujoks 2006, https://doi.org/10.1109/TEVC.2005.859463, for expected hypervolume
improvement; Jones, Schonlau and Welch 1998, https://doi.org/10.1023/A:1008306431147, for the term of a step.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from nas.run.pareto import Point
from search_spaces.optima.stages import Floats


def expected_improvement(
    latency_s: Floats, mean: Floats, deviation: Floats, points: Sequence[Point], reference: Point
) -> Floats:
    """Expected hypervolume that each candidate adds to the front of the points, seconds x nats."""
    inside = sorted(point for point in points if point[0] < reference[0] and point[1] < reference[1])
    steps = np.array([(0.0, reference[1]), *inside])
    lowest = np.minimum.accumulate(steps[:, 1])
    steps = steps[np.append(True, lowest[1:] < lowest[:-1])]  # of many points few are on the front
    edges, heights = np.append(steps[:, 0], reference[0]), steps[:, 1]
    begins, ends = edges[:-1], edges[1:]
    widths = (ends - np.maximum(begins, latency_s[:, None])).clip(min=0)  # candidates x steps
    gaps = heights - mean[:, None]
    scaled = gaps / deviation[:, None]
    density = np.exp(-(scaled**2) / 2) / np.sqrt(2 * np.pi)
    expected: Floats = (widths * (gaps * ndtr(scaled) + deviation[:, None] * density)).sum(axis=1)
    return expected
