"""Whether a trial is stopped at a rung, and what it would have come to: functions of earlier results alone.

A rung says something of the end only where it is shown to: over the completed trials that may be seen, losses at the
rung must order as losses at the end do. What they still swap is the margin by which a trial must be behind.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nas.study.finalists import Result

MIN_RIVALS = 8  # completed trials before any is stopped: luck orders fewer as often as not
MIN_CORRELATION = 0.9  # of 8 trials, at most 4 pairs of neighbours are swapped: sum of squares 8, 1 - 6 * 8 / (8 * 63)


def dominated_at_rung(rung: int, latency_s: float, val_loss: float, rivals: Sequence[Result]) -> bool:
    """Whether a rival was at least as cheap and better at this rung, by more than what trials still swap from there on.

    val_loss: nats. rivals: earlier candidates; those count that completed and have a loss at this rung. Only what is
    dominated in price is ever stopped, so the cheap end of the front survives whatever its loss.
    """
    known = _completed(rung, rivals)
    if len(known) < MIN_RIVALS:
        return False
    at_rung, at_end = [one.at_rung for one in known], [one.at_end for one in known]
    if spearman(at_rung, at_end) < MIN_CORRELATION:
        return False
    least = val_loss - widest_swap(at_rung, at_end)
    return any(one.latency_s <= latency_s and one.at_rung < least for one in known)


def expected_ends(results: Sequence[Result]) -> list[float | None]:
    """The losses that trials ended with, in nats; of stopped ones those that least squares over the completed expect.

    Over the 150 trainings of `experiments/data/table-12.csv` these are 0.044 nats off after a quarter of the tokens,
    0.017 after half (standard deviations). None for what diverged or failed, and for what was stopped at a rung that
    fewer than MIN_RIVALS have passed.
    """
    rungs = {len(one.rung_losses) - 1 for one in results if one.status == "stopped" and one.rung_losses}
    lines = {rung: _line(_completed(rung, results)) for rung in rungs}
    ends: list[float | None] = []
    for one in results:
        line = lines.get(len(one.rung_losses) - 1) if one.status == "stopped" else None
        ends.append(one.log_perplexity if line is None else line.at(one.rung_losses[-1]))
    return ends


class _Line(NamedTuple):
    """Loss at the end by loss at a rung, through the means of both."""

    at_rung: float
    at_end: float
    slope: float

    def at(self, at_rung: float) -> float:
        return self.at_end + self.slope * (at_rung - self.at_rung)


def _line(known: Sequence["_Completed"]) -> _Line | None:
    if len(known) < MIN_RIVALS:
        return None
    at_rung, at_end = np.array([(one.at_rung, one.at_end) for one in known]).T
    middle = float(at_rung.mean())
    terms = np.column_stack([np.ones(len(known)), at_rung - middle])
    (mean, slope), *_ = np.linalg.lstsq(terms, at_end, rcond=None)  # of trials that are all equal at a rung, slope 0
    return _Line(middle, float(mean), float(slope))


class _Completed(NamedTuple):
    """Of a trial that completed: its price, and its losses at a rung and at the end, nats."""

    latency_s: float
    at_rung: float
    at_end: float


def _completed(rung: int, rivals: Sequence[Result]) -> list[_Completed]:
    return [
        _Completed(one.latency_s, one.rung_losses[rung], one.log_perplexity)
        for one in rivals
        if one.log_perplexity is not None and rung < len(one.rung_losses)
    ]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks, -1 to 1, equal values sharing theirs; 0 where all values of a side are equal.

    Source: Spearman 1904, "The proof and measurement of association between two things".
    """
    ranks = np.stack([_shared_ranks(one), _shared_ranks(other)])
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    norms = np.sqrt((centred**2).sum(axis=1))
    return float(centred[0] @ centred[1] / norms.prod()) if norms.all() else 0.0


def widest_swap(at_rung: Sequence[float], at_end: Sequence[float]) -> float:
    """The largest lead at a rung that was behind at the end, in nats; 0 if none was."""
    pairs = permutations(zip(at_rung, at_end, strict=True), 2)
    leads = [other[0] - one[0] for one, other in pairs if one[0] < other[0] and one[1] > other[1]]
    return max(leads, default=0.0)


def _shared_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """From 1; equal values have the mean of their ranks."""
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return ranks[places]
