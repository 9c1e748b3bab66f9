"""Finds the best members at every cost within budgets, by a score that is a sum over layers.

This is label setting. A label is a path from the source to a boundary, with its cost in every measure and its score. At
each boundary, dominated labels are dropped, and all but one of equal cost and score. The labels of the last level then
have every optimal pair of cost and score.

Source: Desrochers and Soumis 1988, "A generalized permanent labelling algorithm for the shortest path problem with time
windows".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any, NamedTuple, TypeAlias

import moocore
import numpy as np
from numpy.typing import NDArray

from costmodel.errors import UserError
from search_spaces.architecture import Layer
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import UNITS_PER
from search_spaces.graph import Cost, Edge, edges_by_depth
from search_spaces.notation import Member
from search_spaces.space import member_of

Scores: TypeAlias = NDArray[np.float64]  # depths x layers (in the order of `Stages.layers`); lower is better
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Index: TypeAlias = NDArray[np.intp]


class Edges(NamedTuple):
    """The choices of one depth, one entry each, ordered by `start`.

    start, stop: index of the boundary before and after a choice among the boundaries of its depth.
    layer: index of the chosen layer in `Stages.layers`.
    cost: costs as in `FeasibleSpace.costs` (choices x measures); those of the first depth include the embedding, and
        those of the last depth the head.
    """

    start: Index
    stop: Index
    layer: Index
    cost: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """The choices of a space with a budget, made by `stages_of`.

    layers: the distinct layers of the space. steps: the choices of each depth.
    """

    feasible: FeasibleSpace
    layers: tuple[Layer, ...]
    steps: tuple[Edges, ...] = field(repr=False)

    @property
    def limit(self) -> Cost:
        """The upper bound of the cost in every measure, in the units of `Edges.cost`."""
        return self.feasible.paths.limit

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of scores: depths x layers."""
        return len(self.steps), len(self.layers)

    def numbered(self, placements: Sequence[Sequence[Layer]]) -> Index:
        """Return the index in `self.layers` of every layer of the placements: an array of placements x depths."""
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        return np.array([[numbers[layer] for layer in layers] for layers in placements], dtype=np.intp)


def stages_of(feasible: FeasibleSpace) -> Stages:
    """Return the choices of a feasible space for each depth, with their costs."""
    layers = feasible.space.layers
    layer_numbers = {layer: number for number, layer in enumerate(layers)}

    def row(edge: Edge) -> tuple[int, ...]:
        return (edge.start, edge.stop, layer_numbers[edge.choice.layer], *edge.cost(feasible.costs))

    steps = (_edges(sorted(map(row, edges))) for edges in edges_by_depth(feasible.space.graph))
    return Stages(feasible=feasible, layers=layers, steps=tuple(steps))


def checked(stages: Stages, scores: Scores) -> Scores:
    """Return the scores unchanged; a UserError is raised if their shape is not `stages.shape` or one is not finite."""
    if scores.shape != stages.shape:
        raise UserError(f"scores must be {stages.shape[0]} depths x {stages.shape[1]} layers, but are {scores.shape}.")
    if not np.isfinite(scores).all():
        raise UserError("scores must be finite numbers; give what is impossible a large one.")
    return scores


def least_to_go(stages: Stages) -> list[Ints]:
    """Return the least cost from each boundary to the sink: per depth, from 0, an array of boundaries x measures.

    Each measure is minimised separately, so that a single path need not have all the least costs of a boundary.
    """
    to_go = [np.zeros((1 + stages.steps[-1].stop.max(), len(stages.limit)), dtype=np.int64)]
    for edges in reversed(stages.steps):
        firsts = np.flatnonzero(np.diff(edges.start, prepend=-1))
        to_go.insert(0, np.minimum.reduceat(edges.cost + to_go[0][edges.stop], firsts, axis=0))
    return to_go


def _edges(rows: list[tuple[int, ...]]) -> Edges:
    table: NDArray[Any] = np.array(rows, dtype=np.int64)
    start, stop, layer = (table[:, column].astype(np.intp) for column in range(3))
    return Edges(start=start, stop=stop, layer=layer, cost=table[:, 3:])


Bools: TypeAlias = NDArray[np.bool_]


class Labels(NamedTuple):
    """Nondominated partial paths from the source to the boundaries of one depth (a level), one entry each.

    at: index of the boundary where a path ends, among those of its depth.
    cost: labels x measures. score: sum over the path's layers.
    parent: index, in the previous level, of the same path without its last layer. layer: index of its last layer in
        `Stages.layers`. Both are -1 at the source.
    """

    at: Index
    cost: Ints
    score: Floats
    parent: Index
    layer: Index


def levels_of_labels(stages: Stages, scores: Scores) -> list[Labels]:
    """Return the labels of every level, from the source to the boundaries after the last layer.

    Labels that cannot be continued within the bound of some measure are left out.
    """
    to_go = least_to_go(stages)
    start = np.zeros(1, dtype=np.intp)
    levels = [Labels(start, np.zeros((1, len(stages.limit)), dtype=np.int64), np.zeros(1), start - 1, start - 1)]
    for depth in range(len(stages.steps)):
        labels = _prolonged(levels[-1], *_useful_edges(stages.steps[depth], scores[depth]))
        labels = _kept(labels, (labels.cost + to_go[depth + 1][labels.at] <= stages.limit).all(axis=1))
        levels.append(_kept(labels, _nondominated_in_groups(labels.at, labels.cost, labels.score)))
    return levels


def layers_to(levels: Sequence[Labels], index: int) -> list[int]:
    """Return the index in `Stages.layers` of each layer on the path of label `index` of the last level, in order."""
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
    """Return a mask of the rows that no other dominates in cost (rows x measures) and score; of equal rows, one."""
    points = np.column_stack([cost.astype(np.float64), score])
    varied = points[:, np.ptp(points, axis=0) > 0] if len(points) > 1 else points[:, :0]
    if varied.shape[1] > 1:
        kept: Bools = moocore.is_nondominated(varied, keep_weakly=False)
    else:
        kept = np.arange(len(points)) == (np.argmin(varied[:, 0]) if varied.shape[1] else 0)
    return kept


def _kept(labels: Labels, rows: Bools) -> Labels:
    return Labels._make(column[rows] for column in labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """The layers of an optimal path, their summed score (lower is better) and the path's cost.

    `cost` has the measures of `FeasibleSpace.costs`, in the integer units of `priced_space`, rounded up to whole steps.
    `latency_s` is in seconds per new token; it is 0 if the budget does not bound latency.
    """

    layers: tuple[Layer, ...]
    score: float
    cost: Cost

    @property
    def latency_s(self) -> float:
        return self.cost[0] / UNITS_PER["latency_s"]


def frontier(stages: Stages, scores: Scores) -> list[Optimum]:
    """Return the optima within the budget that none dominates in score and the bounded measures, cheapest first.

    They are ordered by the first measure of `cost`, then by the next ones. Raises UserError as `checked`.
    """
    levels = levels_of_labels(stages, checked(stages, scores))
    last = levels[-1]
    rows = np.flatnonzero(nondominated_rows(last.cost, last.score))
    order = rows[np.lexsort(last.cost[rows].T[::-1])]
    return [_optimum(stages, levels, int(row)) for row in order]


def member_of_optimum(stages: Stages, optimum: Optimum, *, entropy_regularised: bool | None = None) -> Member:
    """Return the member with the layers of an optimum. entropy_regularised: None for the space's first recipe."""
    return member_of(stages.feasible.space, optimum.layers, entropy_regularised=entropy_regularised)


def _optimum(stages: Stages, levels: Sequence[Labels], index: int) -> Optimum:
    last = levels[-1]
    layers = tuple(stages.layers[number] for number in layers_to(levels, index))
    cost = tuple(map(mul, last.cost[index].tolist(), stages.feasible.step))
    return Optimum(layers=layers, score=float(last.score[index]), cost=cost)
