"""What an early loss of a member says of the end of its training: Bayesian linear regression on ends that are known.

A line through early losses and losses at the end, both over what the parent loses. What has been trained to its end
moves the weights from their prior, which is of many trainings before.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 2.1; Kennedy and O'Hagan 2000,
https://doi.org/10.1093/biomet/87.1.1, for a cheap code's discrepancy from a dear one as a model of its own.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nas.searchers.strategy import Trained

Floats: TypeAlias = NDArray[np.float64]


class Line(NamedTuple):
    """A prior, in nats. mean, deviation: of the end over the parent's loss where the early loss is just that, and of
    how much a further early nat adds. around: standard deviation of an end around that; per_nat: how much larger it is
    per early nat.
    """

    mean: tuple[float, float]
    deviation: tuple[float, float]
    around: float
    per_nat: float = 0.0


# Trainings that come with the builtin parent, of before streams between layers were in the loss; of four that were
# trained anew with it, 0.09, 0.12, 0.24 and 2.15 nats over the parent became 0.06, 0.10, 0.20 and 1.69.
BEFORE = Line(mean=(-0.015, 0.9), deviation=(0.03, 0.1), around=0.025, per_nat=0.03)


class End(NamedTuple):
    """The log-perplexity expected at the end, nats, and its standard deviation."""

    mean: float
    deviation: float


def after_trainings(known: Sequence[Trained], trained: Sequence[Trained], base: float) -> list[Trained]:
    """What is expected of members that were trained before by another recipe, by those that have been trained by this.

    Deviations are of each member by itself: how far off the weights are is common to all, and decides between none.

    base: the parent's loss.
    """
    over = {
        training.member: training.log_perplexity - base for training in known if training.log_perplexity is not None
    }
    ends = {
        training.member: training.log_perplexity
        for training in trained
        if training.deviation is None and training.member in over
    }
    ended = {member: loss - base for member, loss in ends.items() if loss is not None}
    rows, at_end = _rows(over.values()), _rows([over[member] for member in ended])
    return [
        Trained(member=member, latency_s=math.nan, log_perplexity=base + end.mean, deviation=_noise(early, BEFORE))
        for (member, early), end in zip(
            over.items(), expected_ends(rows, at_end, list(ended.values()), BEFORE), strict=True
        )
    ]


def after_looks(looks: Sequence[float], ended: Sequence[tuple[float, float]], line: Line, base: float) -> list[End]:
    """The ends that are expected after these losses, nats.

    ended: loss at a look and at the end, of what has been trained to its end. base: the parent's loss.
    """
    at_look, at_end = np.array(ended, dtype=float).reshape(-1, 2).T
    ends = expected_ends(_rows(np.array(looks) - base), _rows(at_look - base), at_end - base, line)
    return [End(base + end.mean, end.deviation) for end in ends]


def expected_ends(rows: Floats, known: Floats, at_end: Sequence[float] | Floats, line: Line) -> list[End]:
    """Ends over the parent's loss. rows: of each early loss what the line weighs. known, at_end: of what has ended."""
    if not len(rows):
        return []
    noise = np.array([_noise(early, line) for early in known[:, 1]])
    prior = np.array(line.deviation) ** -2
    covariance = np.linalg.inv(np.diag(prior) + (known.T / noise**2) @ known)
    weights = covariance @ (np.array(line.mean) * prior + (known.T / noise**2) @ np.array(at_end))
    return [End(float(row @ weights), math.sqrt(row @ covariance @ row + _noise(row[1], line) ** 2)) for row in rows]


def _noise(early: float, line: Line) -> float:
    return line.around + line.per_nat * max(0.0, float(early))


def _rows(early: Iterable[float]) -> Floats:
    """What a line weighs of each: 1, and the early loss."""
    losses = np.array(list(early), dtype=float)
    return np.column_stack([np.ones(len(losses)), losses])
