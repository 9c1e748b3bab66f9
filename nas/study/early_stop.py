"""Whether a trial is stopped at a rung: a function of earlier results alone.

A rung says something of the end only where it is shown to: over the completed trials that may be seen, losses at the
rung must order as losses at the end do. What they still swap is the margin by which a trial must be behind.
"""

from collections.abc import Sequence
from itertools import permutations

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
    known = [
        (one.latency_s, one.rung_losses[rung], one.log_perplexity)
        for one in rivals
        if one.log_perplexity is not None and rung < len(one.rung_losses)
    ]
    if len(known) < MIN_RIVALS:
        return False
    at_rung, at_end = [loss for _, loss, _ in known], [loss for *_, loss in known]
    if spearman(at_rung, at_end) < MIN_CORRELATION:
        return False
    least = val_loss - widest_swap(at_rung, at_end)
    return any(latency <= latency_s and loss < least for latency, loss, _ in known)


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
