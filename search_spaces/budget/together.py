"""Sums, for each cost of a table, the weights of the costs in a second table that fit a limit together with it.

Pairs of nodes of two k-d trees, one for each table, are compared from the roots down by their least and greatest costs.
If all or none of their sums are within the limit, a pair is not divided further. Measures that rise together, such as
seconds and bytes, leave few pairs to divide.
"""

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from search_spaces.graph import Cost

Ints: TypeAlias = NDArray[np.int64]
Index: TypeAlias = NDArray[np.intp]

LEAVES = 16, 64  # largest number of rows in a leaf, of the first and the second tree
BATCH = 2**18  # comparisons made at once, as floats: 2 MB


class Tree(NamedTuple):
    """A k-d tree of a table of costs (rows x measures).

    rows: leaves x rows of a leaf: indices into the table; an index past its end stands for a copy of its last row.
    least, greatest: for each level, from root to leaves, the bounds of the costs in each node (nodes x measures).
    """

    rows: Index
    least: list[Ints]
    greatest: list[Ints]


def sums_together(costs: Ints, others: Ints, limit: Cost, weights: Ints, max_steps: float = math.inf) -> Ints | None:
    """Return, for each row of `costs`, the summed weights of the rows of `others` that fit the limit together with it.

    costs, others: rows x measures; `others` has at least one row. limit: greatest sum of a row of `costs` and one of
    `others`, by measure. weights: sets of weights x rows of `others`, each from 0 to 2^40; their sums must fit in 63
    bits. The result is sets x rows of `costs`. It is None if an estimate of the comparisons and additions of rows
    exceeds `max_steps`.
    """
    if not len(costs):
        return weights[:, :0]
    trees = _tree(costs, LEAVES[0]), _tree(others, LEAVES[1])
    levels = min(len(tree.least) for tree in trees)  # the first of the deeper tree are left out
    (low, high), (other_low, other_high) = ((tree.least[-levels:], tree.greatest[-levels:]) for tree in trees)
    rows = trees[1].rows
    by_leaf = np.pad(weights, ((0, 0), (0, rows.size - len(others)))).T[rows]  # leaves x rows x columns
    num_steps = trees[0].rows.shape[1] * rows.shape[1] * (len(limit) + len(weights))  # of two leaves
    one, other = (place.ravel() for place in np.indices((len(low[0]), len(other_low[0]))))
    sums = np.zeros((len(low[0]), len(weights)), dtype=np.int64)
    for level in range(levels):
        if level:
            one, other = (2 * one[:, None] + [0, 0, 1, 1]).ravel(), (2 * other[:, None] + [0, 1, 0, 1]).ravel()
            sums = sums.repeat(2, axis=0)
        is_within, is_partly = np.ones(len(one), dtype=bool), np.ones(len(one), dtype=bool)
        for measure, most in enumerate(limit):
            is_within &= high[level][one, measure] <= most - other_high[level][other, measure]
            is_partly &= low[level][one, measure] <= most - other_low[level][other, measure]
        of_nodes = by_leaf.reshape(len(other_low[level]), -1, len(weights)).sum(axis=1)
        np.add.at(sums, one[is_within], of_nodes[other[is_within]])
        is_partly &= ~is_within
        one, other = one[is_partly], other[is_partly]
        if len(one) * num_steps << levels - 1 - level > max_steps:  # each level divides at least twice as many
            return None
    left = [most - column for most, column in zip(limit, _padded(costs, trees[0].rows.size).T, strict=True)]
    added = _compared(trees, left, others, by_leaf.astype(np.float64), one, other)
    whole = np.empty((trees[0].rows.size, len(weights)), dtype=np.int64)
    whole[trees[0].rows] = sums[:, None] + added
    return whole[: len(costs)].T


def _compared(
    trees: tuple[Tree, Tree], left: list[Ints], others: Ints, weights: NDArray[np.float64], one: Index, other: Index
) -> Ints:
    """Return the sums (leaves x rows x columns) of pairs of leaves, row by row.

    Costs are compared by rank, in 32 bits, which takes half the time. Products are of floats, for the sake of speed,
    and exact, since the weights of a leaf add up to less than 2^53.
    """
    ranks = []
    for least, column in zip(left, _padded(others, trees[1].rows.size).T, strict=True):
        values = np.unique(column)
        pair = values.searchsorted(least, side="right") - 1, values.searchsorted(column)
        ranks.append([rank.astype(np.int32)[tree.rows] for tree, rank in zip(trees, pair, strict=True)])
    sums = np.zeros((*trees[0].rows.shape, weights.shape[2]), dtype=np.int64)
    order = np.argsort(one, kind="stable")
    at_once = BATCH // (trees[0].rows.shape[1] * trees[1].rows.shape[1])
    for begin in range(0, len(order), at_once):
        batch = order[begin : begin + at_once]
        is_within = np.ones((len(batch), trees[0].rows.shape[1], trees[1].rows.shape[1]), dtype=bool)
        for most, rank in ranks:
            is_within &= most[one[batch]][:, :, None] >= rank[other[batch]][:, None]
        leaves, first = np.unique(one[batch], return_index=True)
        parts = is_within.astype(np.float64) @ weights[other[batch]]
        sums[leaves] += np.add.reduceat(parts.astype(np.int64), first)
    return sums


def _tree(costs: Ints, leaf: int) -> Tree:
    """Return the tree of rows of costs (rows x measures), of which there must be one, in leaves of up to `leaf`."""
    num_levels = (-(-len(costs) // leaf) - 1).bit_length()
    padded = _padded(costs, -(-len(costs) // 2**num_levels) << num_levels)
    scale = 1 / np.maximum(1, np.ptp(costs, axis=0))
    rows = np.arange(len(padded))[None]
    for _ in range(num_levels):  # a node is divided at the median of the measure in which it is widest
        inside = padded[rows]  # nodes x rows x measures
        widest = (np.ptp(inside, axis=1) * scale).argmax(axis=1)
        order = np.argsort(np.take_along_axis(inside, widest[:, None, None], axis=2)[:, :, 0], axis=1)
        rows = np.take_along_axis(rows, order, axis=1).reshape(2 * len(rows), -1)
    levels = [padded[rows.reshape(2**level, -1)] for level in range(num_levels + 1)]
    return Tree(rows, [level.min(axis=1) for level in levels], [level.max(axis=1) for level in levels])


def _padded(rows: Ints, size: int) -> Ints:
    return np.pad(rows, ((0, size - len(rows)), (0, 0)), mode="edge")
