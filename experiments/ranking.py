"""Compares perplexities of the same rows from two sources: rank correlation, and pairs in the same order.

A row whose training diverged has an infinite perplexity, which ranks last.
"""

import math
from collections.abc import Mapping
from itertools import combinations
from typing import TypeAlias

from scipy.stats import rankdata, spearmanr

Perplexities: TypeAlias = Mapping[str, float]  # by row


def spearman(perplexities: Perplexities, other: Perplexities) -> float:
    """Return the rank correlation over the rows of `perplexities`, with shared ranks; NaN if a side is constant."""
    sides = [[side[row] for row in perplexities] for side in (perplexities, other)]
    return math.nan if any(len(set(side)) == 1 for side in sides) else float(spearmanr(*sides).statistic)


def pairs_in_order(printed: Perplexities, ours: Perplexities) -> tuple[int, int]:
    """Return the number of pairs that both sources order alike, and of pairs that differ in print."""
    pairs = [(row, other) for row, other in combinations(printed, 2) if printed[row] != printed[other]]
    alike = sum((printed[row] < printed[behind]) == (ours[row] < ours[behind]) for row, behind in pairs)
    return alike, len(pairs)


def ranks_of(perplexities: Perplexities) -> dict[str, float]:
    """Return the rank of each row; equal perplexities share the mean of their ranks."""
    return dict(zip(perplexities, rankdata(list(perplexities.values())).tolist(), strict=True))
