"""Perplexities of the same rows from two sources against each other: rank correlation, and pairs in order.

A row whose training diverged has perplexity infinity, which ranks last.
"""

import math
from collections.abc import Mapping
from itertools import combinations
from typing import TypeAlias

from scipy.stats import rankdata, spearmanr

Perplexities: TypeAlias = Mapping[str, float]  # by row


def spearman(perplexities: Perplexities, other: Perplexities) -> float:
    """Rank correlation over the rows of `perplexities`; equal ones share a rank. NaN if a side has one rank only."""
    sides = [[side[row] for row in perplexities] for side in (perplexities, other)]
    return math.nan if any(len(set(side)) == 1 for side in sides) else float(spearmanr(*sides).statistic)


def pairs_in_order(printed: Perplexities, ours: Perplexities) -> tuple[int, int]:
    """(pairs of rows that both order alike, pairs that differ in print)."""
    pairs = [(row, other) for row, other in combinations(printed, 2) if printed[row] != printed[other]]
    alike = sum((printed[row] < printed[behind]) == (ours[row] < ours[behind]) for row, behind in pairs)
    return alike, len(pairs)


def ranks_of(perplexities: Perplexities) -> dict[str, float]:
    """Equal perplexities share a rank, the mean of theirs."""
    return dict(zip(perplexities, rankdata(list(perplexities.values())).tolist(), strict=True))
