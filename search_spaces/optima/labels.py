"""Label setting on the stages of a space, which keeps only partial paths that may be part of an optimum.

A label is a path from the source to a boundary, with its cost in every measure and its score. At each boundary only
nondominated labels are kept, so every optimal path is among those of the last level.

Source: Desrochers and Soumis 1988, "A generalized permanent labelling algorithm for the shortest path problem with time
windows".
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import moocore
import numpy as np
from numpy.typing import NDArray

from search_spaces.optima.stages import Edges, Floats, Index, Ints, Scores, Stages, least_to_go

Bools: TypeAlias = NDArray[np.bool_]


class Labels(NamedTuple):
    """The partial paths to one level that are kept: `at` a boundary, with a `cost` (labels x measures) and a `score`.

    `parent` is the label of the previous level, and `layer` the choice that leads from it.
    """

    at: Index
    cost: Ints
    score: Floats
    parent: Index
    layer: Index


def levels_of_labels(stages: Stages, scores: Scores) -> list[Labels]:
    """Return the labels of every level, the source's first; those of the last level are paths within the limits."""
    to_go = least_to_go(stages)
    start = np.zeros(1, dtype=np.intp)
    levels = [Labels(start, np.zeros((1, len(stages.limit)), dtype=np.int64), np.zeros(1), start - 1, start - 1)]
    for depth in range(len(stages.steps)):
        labels = _prolonged(levels[-1], *_useful_edges(stages.steps[depth], scores[depth]))
        labels = _kept(labels, (labels.cost + to_go[depth + 1][labels.at] <= stages.limit).all(axis=1))
        levels.append(_kept(labels, _nondominated_in_groups(labels.at, labels.cost, labels.score)))
    return levels


def layers_to(levels: Sequence[Labels], index: int) -> list[int]:
    """Return the numbers of the layers that lead to a label of the last level."""
    layers: list[int] = []
    for labels in reversed(levels[1:]):
        layers.insert(0, int(labels.layer[index]))
        index = int(labels.parent[index])
    return layers


def _useful_edges(edges: Edges, scores: Floats) -> tuple[Edges, Floats]:
    """Return the nondominated edges between each two boundaries, and their scores."""
    gains = scores[edges.layer]
    groups = edges.start * (edges.stop.max() + 1) + edges.stop
    order = np.lexsort((gains, *edges.cost.T[::-1], groups))
    keys = np.column_stack([groups, edges.cost])[order]
    best = order[np.any(np.diff(keys, axis=0, prepend=-1) != 0, axis=1)]  # the first of equal costs has the best score
    kept = best[_nondominated_in_groups(groups[best], edges.cost[best], gains[best])]
    return Edges._make(column[kept] for column in edges), gains[kept]


def _prolonged(labels: Labels, edges: Edges, gains: Floats) -> Labels:
    order = np.argsort(labels.at, kind="stable")
    begins, ends = (np.searchsorted(labels.at[order], edges.start, side=side) for side in ("left", "right"))
    counts = ends - begins
    edge = np.repeat(np.arange(len(edges.start)), counts)
    offset = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts)
    parent = order[np.repeat(begins, counts) + offset]
    return Labels(
        at=edges.stop[edge],
        cost=labels.cost[parent] + edges.cost[edge],
        score=labels.score[parent] + gains[edge],
        parent=parent,
        layer=edges.layer[edge],
    )


def _nondominated_in_groups(groups: Index, cost: Ints, score: Floats) -> Bools:
    """Return which rows are nondominated in their group by cost and score; of equal rows the first."""
    kept = np.zeros(len(score), dtype=bool)
    varied = [measure for measure in cost.T if len(measure) and np.ptp(measure)]
    # by ascending cost, nondominated rows have a new minimum score; ranks of later groups are shifted below
    if len(varied) < 2:
        order = np.lexsort((score, *varied, groups))
        begins = np.diff(groups[order], prepend=-1) != 0
        ranks = np.unique(score, return_inverse=True)[1][order] - np.cumsum(begins) * len(score)
        kept[order] = np.diff(np.minimum.accumulate(ranks), prepend=0) < 0
        return kept
    order = np.argsort(groups, kind="stable")
    firsts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    for rows in np.split(order, firsts[1:]):
        rows = np.sort(rows)
        kept[rows[nondominated_rows(cost[rows], score[rows])]] = True
    return kept


def nondominated_rows(cost: Ints, score: Floats) -> Bools:
    """Return a mask of the rows nondominated in cost (rows x measures) and score, with one of several equal rows."""
    points = np.column_stack([cost.astype(np.float64), score])
    varied = points[:, np.ptp(points, axis=0) > 0] if len(points) > 1 else points[:, :0]
    if varied.shape[1] > 1:
        kept: Bools = moocore.is_nondominated(varied, keep_weakly=False)
    else:
        kept = np.arange(len(points)) == (np.argmin(varied[:, 0]) if varied.shape[1] else 0)
    return kept


def _kept(labels: Labels, rows: Bools) -> Labels:
    return Labels._make(column[rows] for column in labels)
