"""Partial paths that no other makes useless: label setting on the stages of a space.

A label is a way from the source to a boundary: its latency, its bytes and its score. Of labels at one boundary those
stay that no other is as good as in all three, so that every best path is among those of the last level.

Source: Desrochers and Soumis 1988, "A generalized permanent labelling algorithm for the shortest path problem with time
windows".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import moocore
import numpy as np
from numpy.typing import NDArray

from search_spaces.optima.stages import Edges, Floats, Index, Ints, Scores, Stages, least_to_go

Bools: TypeAlias = NDArray[np.bool_]


class Labels(NamedTuple):
    """Of one level. at: boundary. changes: the state of `Unlike`. parent, layer: the label before, and what was chosen.

    cost: labels x 2.
    """

    at: Index
    cost: Ints
    score: Floats
    changes: Index
    parent: Index
    layer: Index


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unlike:
    """Paths to differ from. forms: by path and depth, the number of what is priced. least: in how many depths."""

    forms: tuple[tuple[int, ...], ...] = ()
    least: int = 0

    @property
    def done(self) -> int:
        """The state in which a path differs enough from all."""
        return int((self.least + 1) ** len(self.forms)) - 1

    def after(self, changes: Index, form: Index, depth: int) -> Index:
        """The state once these forms are chosen: a digit per path, how many differ, up to `least`."""
        state, base = np.zeros_like(changes), self.least + 1
        for place, forms in enumerate(self.forms):
            digit = changes // base**place % base
            state += np.minimum(digit + (form != forms[depth]), self.least) * base**place
        return state

    def kind(self, form: Index, depth: int) -> Index:
        """Which of the paths a form is alike at a depth, as a number: what else it is does not matter."""
        kind = np.zeros_like(form)
        for place, forms in enumerate(self.forms):
            kind += (form == forms[depth]) * 2**place
        return kind


ANY = Unlike()


def levels_of_labels(stages: Stages, scores: Scores, unlike: Unlike = ANY) -> list[Labels]:
    """The labels of every level, the source's first; the last one's are paths within the limits and unlike enough."""
    to_go = least_to_go(stages)
    start = np.zeros(1, dtype=np.intp)
    levels = [Labels(start, np.zeros((1, 2), dtype=np.int64), np.zeros(1), start, start - 1, start - 1)]
    for depth in range(len(stages.steps)):
        edges, gains = _useful_edges(stages.steps[depth], scores[depth], unlike, depth)
        labels = _prolonged(levels[-1], edges, gains, unlike, depth)
        labels = _kept(labels, (labels.cost + to_go[depth + 1][labels.at] <= stages.limit).all(axis=1))
        levels.append(_kept(labels, _nondominated(labels)))
    last = levels[-1]
    levels[-1] = _kept(last, last.changes == unlike.done)
    return levels


def layers_to(levels: Sequence[Labels], index: int) -> list[int]:
    """The numbers of the layers that lead to a label of the last level."""
    layers: list[int] = []
    for labels in reversed(levels[1:]):
        layers.insert(0, int(labels.layer[index]))
        index = int(labels.parent[index])
    return layers


def _useful_edges(edges: Edges, scores: Floats, unlike: Unlike, depth: int) -> tuple[Edges, Floats]:
    """Of edges between the same boundaries (and as unlike), those that no other is as good as; and their scores."""
    gains = scores[edges.layer]
    kind = unlike.kind(edges.form, depth)
    groups = _grouped(edges.start, edges.stop, kind)
    order = np.lexsort((gains, edges.cost[:, 1], edges.cost[:, 0], groups))
    keys = np.column_stack([groups, edges.cost])[order]
    best = order[np.any(np.diff(keys, axis=0, prepend=-1) != 0, axis=1)]  # the first of equal cost has the best score
    kept = best[_nondominated_in_groups(groups[best], edges.cost[best], gains[best])]
    return Edges._make(column[kept] for column in edges), gains[kept]


def _prolonged(labels: Labels, edges: Edges, gains: Floats, unlike: Unlike, depth: int) -> Labels:
    """Every label with every edge from where it is."""
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
        changes=unlike.after(labels.changes[parent], edges.form[edge], depth),
        parent=parent,
        layer=edges.layer[edge],
    )


def _nondominated(labels: Labels) -> Bools:
    return _nondominated_in_groups(_grouped(labels.at, labels.changes), labels.cost, labels.score)


def _grouped(*columns: Index) -> Index:
    """A number for every row, equal for rows that are equal."""
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    return np.asarray(np.ravel_multi_index(columns, sizes), dtype=np.intp)


def _nondominated_in_groups(groups: Index, cost: Ints, score: Floats) -> Bools:
    """Of rows in the same group, those that no other is as good as in cost and score; of equal rows the first."""
    kept = np.zeros(len(score), dtype=bool)
    varied = [measure for measure in cost.T if len(measure) and np.ptp(measure)]
    if len(varied) < 2:  # cheapest first, better ones are those below all before them; groups follow one another lower
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
    """The rows that no other is as good as in latency, bytes and score; of equal rows one. cost: rows x 2."""
    points = np.column_stack([cost.astype(np.float64), score])
    varied = points[:, np.ptp(points, axis=0) > 0] if len(points) > 1 else points[:, :0]
    if varied.shape[1] > 1:
        kept: Bools = moocore.is_nondominated(varied, keep_weakly=False)
    else:
        kept = np.arange(len(points)) == (np.argmin(varied[:, 0]) if varied.shape[1] else 0)
    return kept


def _kept(labels: Labels, rows: Bools) -> Labels:
    return Labels._make(column[rows] for column in labels)
