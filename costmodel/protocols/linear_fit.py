"""Linear fits by relative error, as linear programs or by least squares.

A row maps terms to counts and has a target, the measured value; a fit gives every term a coefficient >= 0 such that the
sums of coefficient x count are close to the targets. Columns and rows are scaled before solving, because raw bytes
(1e10) and seconds per element (1e-6) would be lost in solver tolerances.

Source: Boyd and Vandenberghe 2004, "Convex Optimization", section 6.1 (Chebyshev and l1 approximation as programs).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, nnls

from costmodel.errors import UserError

Counts = Mapping[str, int]
Array = NDArray[np.float64]


def fit(rows: Sequence[Counts], targets: Sequence[float], fixed: Mapping[str, float]) -> dict[str, float]:
    """Return the coefficient of every term by the term's name, the fixed coefficients included.

    Among all coefficients >= 0, the fitted ones have the least mean relative error over the rows.

    Args:
        rows, targets: Counts of terms in each row, and each row's measured value. Fitted are the terms of the first row
            that are not in `fixed`; every row must have these and the fixed terms. A term that is 0 in all rows gets 0.
        fixed: Coefficients that are given and not fitted, by term.
    """
    terms = [term for term in rows[0] if term not in fixed]
    matrix, column_scale = _scaled(rows, targets, terms)
    given = [sum(fixed[term] * row[term] for term in fixed) for row in rows]
    rest = 1.0 - np.array(given) / np.array(targets)
    num_rows, num_terms = matrix.shape  # the variables are the coefficients and the error of each row
    objective = np.r_[np.zeros(num_terms), np.full(num_rows, 1.0 / num_rows)]
    errors = -np.eye(num_rows)
    result = linprog(objective, np.block([[matrix, errors], [-matrix, errors]]), np.r_[rest, -rest], method="highs")
    assert result.success, result.message
    return {**fixed, **dict(zip(terms, map(float, result.x[:num_terms] / column_scale), strict=True))}


def extremes(
    counts: Counts,
    rows: Sequence[Counts],
    targets: Sequence[float],
    tolerance: float,
    bounds: Mapping[str, tuple[float, float]],
) -> tuple[float, float]:
    """Return the least and greatest sum of coefficient x count, for the terms of `counts`, that the rows allow.

    Coefficients must be >= 0, reproduce each row's target within the relative `tolerance`, and lie within `bounds` (the
    least and greatest coefficient, by term). Every row must have the terms of `counts`. The greatest sum is infinite if
    nothing limits a term whose count is not 0. A UserError is raised if no coefficients satisfy all this.
    """
    matrix, column_scale = _scaled(rows, targets, tuple(counts))
    columns = zip(counts, column_scale, strict=True)
    box = [tuple(bound * scale for bound in bounds.get(term, (0.0, np.inf))) for term, scale in columns]
    objective = np.array(list(counts.values())) / column_scale
    ones = np.ones(len(rows))
    sums = []
    for sign in (1.0, -1.0):
        scaled = sign * objective / max(objective.max(), 1.0)
        limits = np.vstack([matrix, -matrix]), np.r_[ones * (1 + tolerance), -ones * (1 - tolerance)]
        result = linprog(scaled, *limits, bounds=box, method="highs")
        if result.status == 2:
            raise UserError(f"no coefficients reproduce every row within {tolerance:.1%}; the tolerance must grow.")
        sums.append(float(objective @ result.x) if result.success else np.inf)
    return sums[0], sums[1]


def least_squares(shares: Array) -> Array:
    """Return the coefficient of each term, >= 0, with the least sum over rows of squared relative errors.

    `shares` is rows x terms: counts divided by the row's target. Columns may differ by ten orders of magnitude.
    """
    scale = np.where(shares.max(axis=0) > 0, shares.max(axis=0), 1.0)
    values: Array = nnls(shares / scale, np.ones(len(shares)))[0] / scale
    return values


def _scaled(rows: Sequence[Counts], targets: Sequence[float], terms: Sequence[str]) -> tuple[Array, Array]:
    """Return rows x terms, divided by targets and each column's greatest entry, and the columns' greatest entries."""
    matrix = np.array([[row[term] for term in terms] for row in rows], dtype=np.float64)
    matrix /= np.array(targets)[:, None]
    column_scale = matrix.max(axis=0)
    column_scale[column_scale == 0] = 1.0
    return matrix / column_scale, column_scale
