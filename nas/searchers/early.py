"""What an early loss of a member says of the end of its training: Bayesian linear regression on ends that are known.

A line through early losses and losses at the end, both over what the parent loses; of cuts, in which some forms of
layers have learned more than in a training of a member alone, with what these forms add. What has been trained to its
end moves the weights from their prior, which is of many trainings before.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 2.1; Kennedy and O'Hagan 2000,
https://doi.org/10.1093/biomet/87.1.1, for a cheap code's discrepancy from a dear one as a model of its own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nas.searchers.strategy import Trained
from search_spaces.architecture import LIVE_NORMS
from search_spaces.deployed import LINEAR_FFNS
from search_spaces.notation import Member

Floats: TypeAlias = NDArray[np.float64]


class Line(NamedTuple):
    """A prior, in nats. mean, deviation: of the end over the parent's loss where the early loss is just that, of how
    much a further early nat adds, and of what forms add (`_shares`), if they do. around: standard deviation of an end
    around that; per_nat: how much larger it is per early nat.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    around: float
    per_nat: float = 0.0


# Least squares over 98 placements from the builtin parent that end within 0.4 nats of it, cut after 655,360 tokens,
# leave 0.026 nats (by the early loss alone 0.034); of cuts 0.6 to 1 nat above the parent 0.05, of worse ones 0.08.
CUT = Line(
    mean=(-0.04, 0.33, 0.05, 0.04, 0.13, 0.02, -0.01),
    deviation=(0.03, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05),
    around=0.015,
    per_nat=0.03,
)


# Trainings that come with the builtin parent, of before streams between layers were in the loss; of four that were
# trained anew with it, 0.09, 0.12, 0.24 and 2.15 nats over the parent became 0.06, 0.10, 0.20 and 1.69.
BEFORE = Line(mean=(-0.015, 0.9), deviation=(0.03, 0.1), around=0.025, per_nat=0.03)


class End(NamedTuple):
    """The log-perplexity expected at the end, nats, and its standard deviation."""

    mean: float
    deviation: float


def after_cuts(cuts: Mapping[Member, float], trained: Sequence[Trained], base: float) -> list[Trained]:
    """What is expected of members that were cut from a nested training, by those that have been trained.

    cuts: nats over the parent of each; nothing is expected of one that is not finite. base: the parent's loss.
    """
    cuts = {member: over for member, over in cuts.items() if math.isfinite(over)}
    return _after(cuts, {member: _shares(member) for member in cuts}, trained, CUT, base)


def after_trainings(known: Sequence[Trained], trained: Sequence[Trained], base: float) -> list[Trained]:
    """What is expected of members that were trained before by another recipe; else as `after_cuts`."""
    over = {one.member: one.log_perplexity - base for one in known if one.log_perplexity is not None}
    return _after(over, dict.fromkeys(over, ()), trained, BEFORE, base)


def _after(
    early: Mapping[Member, float],
    shares: Mapping[Member, Sequence[float]],
    trained: Sequence[Trained],
    line: Line,
    base: float,
) -> list[Trained]:
    """Deviations are of each member by itself: how far off the weights are is common to all, and decides between none.

    early: nats over the parent. shares: what else the line weighs.
    """
    ends = {one.member: one.log_perplexity for one in trained if one.deviation is None and one.member in early}
    ended = {member: loss - base for member, loss in ends.items() if loss is not None}
    rows = {member: np.array([1.0, over, *shares[member]]) for member, over in early.items()}
    expected = expected_ends(
        np.array(list(rows.values())), np.array([rows[member] for member in ended]), list(ended.values()), line
    )
    return [
        Trained(member=member, latency_s=math.nan, log_perplexity=base + end.mean, deviation=_noise(over, line))
        for (member, over), end in zip(early.items(), expected, strict=True)
    ]


def after_looks(looks: Sequence[float], ended: Sequence[tuple[float, float]], line: Line, base: float) -> list[End]:
    """The ends that are expected after these losses, nats.

    ended: loss at a look and at the end, of what has been trained to its end. base: the parent's loss.
    """
    at_look, at_end = np.array(ended, dtype=float).reshape(-1, 2).T
    rows, known = (np.column_stack([np.ones(len(part)), np.array(part) - base]) for part in (looks, at_look))
    ends = expected_ends(rows, known, at_end - base, line)
    return [End(base + end.mean, end.deviation) for end in ends]


def expected_ends(rows: Floats, known: Floats, at_end: Sequence[float] | Floats, line: Line) -> list[End]:
    """Ends over the parent's loss. rows: of each early loss what the line weighs. known, at_end: of what has ended."""
    if not len(rows):
        return []
    known = known.reshape(-1, rows.shape[1])
    noise = np.array([_noise(early, line) for early in known[:, 1]])
    prior = np.array(line.deviation) ** -2
    covariance = np.linalg.inv(np.diag(prior) + (known.T / noise**2) @ known)
    weights = covariance @ (np.array(line.mean) * prior + (known.T / noise**2) @ np.array(at_end))
    return [End(float(row @ weights), math.sqrt(row @ covariance @ row + _noise(row[1], line) ** 2)) for row in rows]


def _noise(early: float, line: Line) -> float:
    return line.around + line.per_nat * max(0.0, float(early))


def _shares(member: Member) -> list[float]:
    """Of the layers: with half of the heads, without attention, with a linear FFN, without FFN; live norms a layer."""
    layers = member.architecture.layers
    counts = (
        sum(layer.attention == "softmax-half" for layer in layers),
        sum(layer.attention == "none" for layer in layers),
        sum(layer.ffn in LINEAR_FFNS for layer in layers),
        sum(layer.ffn == "none" for layer in layers),
        sum((layer.norm1 in LIVE_NORMS) + (layer.norm2 in LIVE_NORMS) for layer in layers),
    )
    return [count / len(layers) for count in counts]
