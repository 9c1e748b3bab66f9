"""Perplexities of the same rows from several sources against each other: rank correlation, order, tables.

Of what papers print only the rows that they have count. A row whose training diverged has perplexity infinity, which
ranks last.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

from rich.table import Table
from scipy.stats import rankdata, spearmanr

from experiments.bars import table

Perplexities: TypeAlias = Mapping[str, float]  # by row
BySeed: TypeAlias = Mapping[int, Perplexities]  # of one variant of training


def spearman(perplexities: Perplexities, other: Perplexities) -> float:
    """Rank correlation over the rows of `perplexities`; equal ones share a rank. NaN if a side has one rank only."""
    sides = [[side[row] for row in perplexities] for side in (perplexities, other)]
    return math.nan if any(len(set(side)) == 1 for side in sides) else float(spearmanr(*sides).statistic)


def pairs_in_order(printed: Perplexities, ours: Perplexities) -> tuple[int, int]:
    """(pairs of rows that both order alike, pairs that differ in print)."""
    pairs = [(row, other) for row, other in combinations(printed, 2) if printed[row] != printed[other]]
    return _num_alike(pairs, printed, ours), len(pairs)


def _num_alike(pairs: Iterable[tuple[str, str]], perplexities: Perplexities, other: Perplexities) -> int:
    """How many pairs of rows both order alike."""
    return sum((perplexities[row] < perplexities[behind]) == (other[row] < other[behind]) for row, behind in pairs)


def means(by_seed: BySeed) -> dict[str, float]:
    """Mean perplexity of every row over seeds; infinity if one diverged."""
    rows = next(iter(by_seed.values()))
    return {row: statistics.fmean(result[row] for result in by_seed.values()) for row in rows}


def decided_pairs(by_seed: BySeed, reference: Perplexities) -> tuple[int, int]:
    """(pairs that the seeds decide as the reference orders them, pairs that they decide).

    A pair is decided if the mean losses, ln perplexity, differ by more than two standard errors of the difference, from
    the variance pooled over rows; so none is with one seed. A row that diverged with every seed is behind all others; a
    row that did so with some is left out.
    """
    seeds = list(by_seed.values())
    losses = {row: [math.log(seed[row]) for seed in seeds] for row in seeds[0]}
    whole = {row: row_losses for row, row_losses in losses.items() if all(map(math.isfinite, row_losses))}
    diverged = [row for row, row_losses in losses.items() if not any(map(math.isfinite, row_losses))]
    if len(seeds) < 2 or not whole:
        return 0, 0
    variance = statistics.fmean(statistics.variance(row_losses) for row_losses in whole.values())
    least = 2 * math.sqrt(2 * variance / len(seeds))
    mean = {row: statistics.fmean(row_losses) for row, row_losses in whole.items()} | dict.fromkeys(diverged, math.inf)
    pairs = [pair for pair in combinations(mean, 2) if abs(mean[pair[0]] - mean[pair[1]]) > least]
    return _num_alike(pairs, mean, reference), len(pairs)


def perplexity_table(printed: Perplexities, variants: Mapping[str, BySeed]) -> Table:
    """Per row: printed perplexity, and for each variant mean, sample standard deviation over seeds, and rank."""
    ranks = {name: ranks_of(means(by_seed)) for name, by_seed in variants.items()}
    rows = []
    for row in _rows(variants):
        cells = [f"{_cell([seed[row] for seed in variants[name].values()])}, {ranks[name][row]:g}" for name in variants]
        paper = f"{_number(printed[row])}, {ranks_of(printed)[row]:g}" if row in printed else "-"
        rows.append((row, paper, *cells))
    columns = ("row", "papers", *(f"{name}, {_seeds(by_seed)}" for name, by_seed in variants.items()))
    return table(columns, rows, title="validation perplexity: mean (standard deviation over seeds), rank")


def correlation_table(printed: Perplexities, variants: Mapping[str, BySeed], seconds: Mapping[str, float]) -> Table:
    """Per variant: Spearman with the papers, of seeds and of means; pairs in their order; the same with the first
    variant, over all rows, and of the pairs that the seeds decide; mean seconds of a training.
    """
    first = means(next(iter(variants.values())))
    rows = []
    for name, by_seed in variants.items():
        mean = means(by_seed)
        agreeing, total = pairs_in_order(printed, mean)
        right, decided = decided_pairs(by_seed, first)
        cells = [_each(printed, by_seed), f"{spearman(printed, mean):.2f}", f"{agreeing} of {total}"]
        cells += [_each(first, by_seed), f"{spearman(first, mean):.2f}"]
        cells += [f"{right} of {decided}" if len(by_seed) > 1 else "-"]
        rows.append((name, *cells, f"{seconds[name]:.0f}"))
    columns = ["variant", "papers, each seed", "papers, means", "pairs in the papers' order"]
    columns += ["first variant, each seed", "first variant, means", "decided pairs in its order", "seconds"]
    return table(columns, rows, title="rank correlation (Spearman)")


def verdicts(printed: Perplexities, variants: Mapping[str, BySeed]) -> list[str]:
    """The order of the papers, whether each variant has it, its own order, and what diverged."""
    lines = [f"papers: {_ascending(printed)}"]
    for name, by_seed in variants.items():
        agreeing, total = pairs_in_order(printed, means(by_seed))
        held = "the papers' order holds" if agreeing == total else f"{total - agreeing} of {total} pairs are swapped"
        lines.append(f"{name}: {held}: {_ascending(means(by_seed))}")
        for row in _rows(variants):
            diverged = sum(math.isinf(result[row]) for result in by_seed.values())
            if diverged or math.isinf(printed.get(row, 0.0)):
                lines.append(f"{name}: {row} diverged with {diverged} of {_seeds(by_seed)}")
    return lines


def _rows(variants: Mapping[str, BySeed]) -> list[str]:
    return list(next(iter(next(iter(variants.values())).values())))


def _each(reference: Perplexities, by_seed: BySeed) -> str:
    return ", ".join(f"{spearman(reference, result):.2f}" for result in by_seed.values())


def ranks_of(perplexities: Perplexities) -> dict[str, float]:
    """Equal perplexities share a rank, the mean of theirs."""
    return dict(zip(perplexities, rankdata(list(perplexities.values())).tolist(), strict=True))


def _ascending(perplexities: Perplexities) -> str:
    ordered = sorted(perplexities.items(), key=lambda item: item[1])
    return " < ".join(f"{row} {_number(perplexity)}" for row, perplexity in ordered)


def _cell(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return _number(mean) + (f" ({statistics.stdev(values):.2g})" if len(values) > 1 and math.isfinite(mean) else "")


def _number(perplexity: float) -> str:
    return f"{perplexity:.4g}" if math.isfinite(perplexity) else "diverged"


def _seeds(by_seed: BySeed) -> str:
    return f"{len(by_seed)} seed{'s' if len(by_seed) > 1 else ''}"
