"""Whether a trial is stopped at a rung, and what it would have come to: functions of earlier results alone.

A rung says something of the end only where it is shown to: over the completed trials that may be seen, losses at the
rung must order as losses at the end do. What they still swap is the margin by which a trial must be behind.
"""

from collections.abc import Callable, Sequence
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
    latencies_s, at_rung, at_end = _completed(rung, rivals)
    if len(at_rung) < MIN_RIVALS or spearman(at_rung, at_end) < MIN_CORRELATION:
        return False
    least = val_loss - widest_swap(at_rung, at_end)
    return bool(((latencies_s <= latency_s) & (at_rung < least)).any())


def expected_ends(results: Sequence[Result]) -> list[float | None]:
    """The losses that trials ended with, in nats; of stopped ones those that least squares over the completed expect.

    Over the 150 trainings of `experiments/data/table-12.csv` these are 0.044 nats off after a quarter of the tokens,
    0.017 after half (standard deviations). None for what diverged or failed, and for what was stopped at a rung that
    fewer than MIN_RIVALS have passed.
    """
    rungs = {len(result.rung_losses) - 1 for result in results if result.status == "stopped" and result.rung_losses}
    lines = {rung: _line(rung, results) for rung in rungs}
    ends: list[float | None] = []
    for result in results:
        line = lines.get(len(result.rung_losses) - 1) if result.status == "stopped" else None
        ends.append(result.log_perplexity if line is None else line(result.rung_losses[-1]))
    return ends


def _line(rung: int, results: Sequence[Result]) -> Callable[[float], float] | None:
    """Loss at the end by loss at a rung, through the means of both."""
    _, at_rung, at_end = _completed(rung, results)
    if len(at_rung) < MIN_RIVALS:
        return None
    middle = float(at_rung.mean())
    terms = np.column_stack([np.ones(len(at_rung)), at_rung - middle])
    (mean, slope), *_ = np.linalg.lstsq(terms, at_end, rcond=None)  # of trials that are all equal at a rung, slope 0
    return lambda loss: float(mean) + float(slope) * (loss - middle)


def _completed(rung: int, results: Sequence[Result]) -> NDArray[np.float64]:
    """Prices of the trials that completed, and their losses at a rung and at the end, nats: 3 x trials."""
    rows = [
        (result.latency_s, result.rung_losses[rung], result.log_perplexity)
        for result in results
        if result.log_perplexity is not None and rung < len(result.rung_losses)
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 3).T


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks, -1 to 1, equal values sharing theirs; 0 where all values of a side are equal.

    Source: Spearman 1904, "The proof and measurement of association between two things".
    """
    ranks = np.stack([_shared_ranks(first), _shared_ranks(second)])
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    norms = np.sqrt((centred**2).sum(axis=1))
    return float(centred[0] @ centred[1] / norms.prod()) if norms.all() else 0.0


def widest_swap(at_rung: Sequence[float], at_end: Sequence[float]) -> float:
    """The largest lead at a rung that was behind at the end, in nats; 0 if none was."""
    pairs = permutations(zip(at_rung, at_end, strict=True), 2)
    leads = [second[0] - first[0] for first, second in pairs if first[0] < second[0] and first[1] > second[1]]
    return max(leads, default=0.0)


def _shared_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """From 1; equal values have the mean of their ranks."""
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return ranks[places]
