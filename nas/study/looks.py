"""The log-perplexity expected at the end of a training that stands at a rung: Bayesian linear regression.

A line relates losses at the first rung to losses at the end, both in nats over the parent's loss. Its prior is of 150
placements from the builtin parent (`experiments/data/table-12.csv`), of which a line of slope 0.74 leaves 0.044 nats
after a quarter of the tokens and 0.018 where losses are within 0.7 nats of the parent's. Over parents of widths 48, 96
and 192 (`across-widths.csv`) slopes are 0.85, 0.81 and 0.78, and 0.02 to 0.03 nats are left. Trainings that ended move
the weights from the prior.

Source: Swersky, Snoek and Adams 2014, arXiv 1406.3896, for resuming what was paused by what its curve promises;
Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 2.1, for the regression.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nas.searchers.strategy import Observation

Floats: TypeAlias = NDArray[np.float64]


class Line(NamedTuple):
    """A prior, in nats. mean, deviation: of the end over the parent's loss where the early loss is just that, and of
    how much a further early nat adds. around: standard deviation of an end around that.
    """

    mean: tuple[float, float]
    deviation: tuple[float, float]
    around: float


class End(NamedTuple):
    """The log-perplexity expected at the end, nats, and its standard deviation."""

    mean: float
    deviation: float


FROM_PARENT = Line((-0.1, 0.74), (0.2, 0.15), around=0.025)
FROM_SCRATCH = Line((-0.1, 0.74), (0.4, 0.3), around=0.025)  # where nothing is known of what candidates can reach


def ends_after_looks(results: Sequence[Observation], parent_loss: float | None) -> list[End | None]:
    """The ends that are expected of the results that are looks; None for the others.

    parent_loss: nats, of what they start from; None from scratch, where the least loss at a rung takes its place.
    """
    looks = [result.rung_losses[0] for result in results if result.status == "paused"]
    if not looks:
        return [None] * len(results)
    base = min(looks) if parent_loss is None else parent_loss
    ended = [
        (result.rung_losses[0], result.log_perplexity)
        for result in results
        if result.log_perplexity is not None and result.rung_losses
    ]
    line = FROM_SCRATCH if parent_loss is None else FROM_PARENT
    expected = iter(_after_looks(looks, ended, line, base))
    return [next(expected) if result.status == "paused" else None for result in results]


def _after_looks(looks: Sequence[float], ended: Sequence[tuple[float, float]], line: Line, base: float) -> list[End]:
    """The ends that are expected after these losses, nats.

    ended: loss at a look and at the end, of what has been trained to its end. base: the parent's loss.
    """
    at_look, at_end = np.array(ended, dtype=float).reshape(-1, 2).T
    rows, known = _rows(np.array(looks) - base), _rows(at_look - base)
    prior = np.array(line.deviation) ** -2
    covariance = np.linalg.inv(np.diag(prior) + (known.T / line.around**2) @ known)
    weights = covariance @ (np.array(line.mean) * prior + (known.T / line.around**2) @ (at_end - base))
    return [End(base + float(row @ weights), math.sqrt(row @ covariance @ row + line.around**2)) for row in rows]


def _rows(early: Floats) -> Floats:
    """What a line weighs of each: 1, and the early loss."""
    return np.column_stack([np.ones(len(early)), early])
