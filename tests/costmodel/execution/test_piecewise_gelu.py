from math import erf, sqrt

import numpy as np
import pytest

from costmodel import ops
from costmodel.execution.interpreter import encoded
from costmodel.execution.op_functions import CUBIC, EVEN, THRESHOLDS, evaluate, numpy_library
from costmodel.ops import Node, OpGraph

STEP = 2.0**-18  # coefficients are multiples of it
NUM_POINTS = 1001
SEGMENTS = {"cubic": (THRESHOLDS[:2], (0, 1, 2, 3), 0.0, CUBIC), "even": (THRESHOLDS[1:], (0, 2, 4, 6), 0.5, EVEN)}


def gelu(source: np.ndarray) -> np.ndarray:
    return source * (np.vectorize(erf)(source / sqrt(2)) * 0.5 + 0.5)


def fitted(ends: tuple[float, float], powers: tuple[int, ...], linear: float) -> list[float]:
    """Coefficients whose polynomial, plus linear * x, is nearest to GELU in least squares on Chebyshev's points.

    From the highest power down, each is rounded to a multiple of STEP before those below it are fitted again.
    """
    low, high = ends
    angles = np.pi * (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS
    points = (low + high) / 2 + (high - low) / 2 * np.cos(angles)  # denser at the ends, where errors grow
    rest = gelu(points) - linear * points
    coefficients: list[float] = []
    for count in range(len(powers), 0, -1):
        columns = points[:, None] ** np.array(powers[:count])
        highest = float(np.linalg.lstsq(columns, rest, rcond=None)[0][-1])
        coefficients.insert(0, round(highest / STEP) * STEP)
        rest = rest - coefficients[0] * points ** powers[count - 1]
    return coefficients


@pytest.mark.parametrize("segment", SEGMENTS)
def test_the_fit_gives_the_coefficients_as_the_engine_holds_them(segment):
    ends, powers, linear, coefficients = SEGMENTS[segment]
    assert list(coefficients) == fitted(ends, powers, linear)


def test_the_greatest_error_is_0_0104_at_2_72():
    points = np.linspace(-8, 8, 160_001)
    op = ops.Gelu(rows=1, features=len(points), form="piecewise")
    errors = np.abs(evaluate(op, numpy_library(), {}, points[None])[0] - gelu(points))
    assert errors.max() == pytest.approx(0.0104, abs=5e-5)
    assert points[errors.argmax()] == pytest.approx(2.72, abs=5e-3)


def test_one_hot_tokens_hold_no_more_than_their_rows():
    """A square of so large a vocabulary would be 8 TiB."""
    embedding = ops.TokenEmbedding(tokens=2, vocab=1 << 20, features=3)
    graph = OpGraph(nodes=(Node(name="embed", layer=0, op=embedding, inputs=("tokens",)),))
    one_hot = encoded(graph, np.array([7, (1 << 20) - 1]))
    assert one_hot.shape == (2, 1 << 20)
    assert [np.flatnonzero(row).tolist() for row in one_hot] == [[7], [(1 << 20) - 1]]
    assert one_hot.max() == one_hot.sum(axis=1).max() == 1
