"""The best member by a score that adds up over layers, within budgets and at every cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np

from search_spaces.architecture import Layer
from search_spaces.budget.edges import Cost
from search_spaces.budget.priced_space import UNITS_PER
from search_spaces.notation import Member
from search_spaces.optima.labels import Labels, layers_to, levels_of_labels, nondominated_rows
from search_spaces.optima.stages import Scores, Stages, checked
from search_spaces.space import member_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """An optimal path; `cost` is in integer units: latency (0 without a budget for it), then other bounded measures."""

    layers: tuple[Layer, ...]
    score: float
    cost: Cost

    @property
    def latency_s(self) -> float:
        return self.cost[0] / UNITS_PER["latency_s"]


def best(stages: Stages, scores: Scores) -> Optimum | None:
    """Return the member of least score within the budget, or None; a UserError is raised for scores that do not fit."""
    levels = levels_of_labels(stages, checked(stages, scores))
    return _optimum(stages, levels, int(np.argmin(levels[-1].score))) if len(levels[-1].score) else None


def frontier(stages: Stages, scores: Scores) -> list[Optimum]:
    """Return the nondominated members by score and cost within the budget, cheapest first.

    All measures with a budget count as costs. A UserError is raised for scores that do not fit.
    """
    levels = levels_of_labels(stages, checked(stages, scores))
    last = levels[-1]
    rows = np.flatnonzero(nondominated_rows(last.cost, last.score))
    order = rows[np.lexsort(last.cost[rows].T[::-1])]
    return [_optimum(stages, levels, int(row)) for row in order]


def member_of_optimum(stages: Stages, optimum: Optimum, *, entropy_regularised: bool | None = None) -> Member:
    """Return the member with these layers, by default with the first recipe of the space."""
    return member_of(stages.feasible.space, optimum.layers, entropy_regularised=entropy_regularised)


def _optimum(stages: Stages, levels: Sequence[Labels], index: int) -> Optimum:
    last = levels[-1]
    layers = tuple(stages.layers[number] for number in layers_to(levels, index))
    cost = tuple(map(mul, last.cost[index].tolist(), stages.feasible.step))
    return Optimum(layers=layers, score=float(last.score[index]), cost=cost)
