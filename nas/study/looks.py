"""What a look says of the end: the log-perplexity expected of a training that stands at a rung.

A line through losses at the rung and at the end, over what the parent loses, by Bayesian linear regression. Its prior
is of 150 placements from the builtin parent (`experiments/data/table-12.csv`), of which a line of slope 0.74 leaves
0.044 nats after a quarter of the tokens and 0.018 where losses are within 0.7 nats of the parent's. What a search
trains to its end moves the line.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 2.1; Swersky, Snoek and Adams
2014, arXiv 1406.3896, for going on with what was paused by what its curve promises.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nas.study.finalists import Result

LINE_MEAN = np.array([-0.1, 0.74])  # nats at the end over the parent's loss: where the rung has just that; by nat more
LINE_DEVIATION = np.array([0.2, 0.15])
FROM_SCRATCH = 2.0  # factor of those, where nothing is known of what candidates can reach
AROUND_LINE = 0.025  # nats, standard deviation of an end


class End(NamedTuple):
    """The log-perplexity expected at the end, nats, and its standard deviation."""

    mean: float
    deviation: float


def ends_after_looks(results: Sequence[Result], parent_loss: float | None) -> list[End | None]:
    """The ends that are expected of the results that are looks; None for the others.

    parent_loss: nats, of what they start from; None from scratch, where the least loss at a rung takes its place.
    """
    looks = [result for result in results if result.status == "paused"]
    if not looks:
        return [None] * len(results)
    base = min(result.rung_losses[0] for result in looks) if parent_loss is None else parent_loss
    pairs = [
        (result.rung_losses[0], result.log_perplexity)
        for result in results
        if result.log_perplexity is not None and result.rung_losses
    ]
    at_rung, at_end = np.array(pairs, dtype=float).reshape(-1, 2).T
    terms = _terms(at_rung, base)
    deviation = LINE_DEVIATION * (FROM_SCRATCH if parent_loss is None else 1.0)
    precision = np.diag(deviation**-2) + terms.T @ terms / AROUND_LINE**2
    covariance = np.linalg.inv(precision)
    line = covariance @ (LINE_MEAN / deviation**2 + terms.T @ (at_end - base) / AROUND_LINE**2)

    def end(result: Result) -> End | None:
        if result.status != "paused":
            return None
        (term,) = _terms(np.array([result.rung_losses[0]]), base)
        return End(float(base + term @ line), float(np.sqrt(term @ covariance @ term + AROUND_LINE**2)))

    return [end(result) for result in results]


def _terms(
    losses: "np.ndarray[tuple[int], np.dtype[np.float64]]", base: float
) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    return np.column_stack([np.ones(len(losses)), losses - base])
