"""The best member by a score that adds up over layers: within budgets, for every price, and unlike others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search_spaces.architecture import Layer
from search_spaces.budget.cost_counts import Cost
from search_spaces.budget.priced_space import UNITS_PER_BYTE, UNITS_PER_S
from search_spaces.notation import Member
from search_spaces.optima.labels import Labels, Unlike, layers_to, levels_of_labels, nondominated_rows
from search_spaces.optima.stages import Scores, Stages, checked, forms_of
from search_spaces.space import member_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """A path. cost: latency and bytes in integer units, 0 for a measure without a budget."""

    layers: tuple[Layer, ...]
    score: float
    cost: Cost

    @property
    def latency_s(self) -> float:
        return self.cost[0] / UNITS_PER_S

    @property
    def sent_bytes(self) -> float:
        return self.cost[1] / UNITS_PER_BYTE


def best(stages: Stages, scores: Scores, *, unlike: Sequence[Member] = (), least_changes: int = 1) -> Optimum | None:
    """The member within the budget of least score, or None if there is none.

    unlike: members from each of which it must differ, as priced, in at least `least_changes` layers.

    Raises UserError for scores that do not fit or a member to differ from that is not in the space.
    """
    checked(stages, scores)
    others = [tuple(forms_of(stages, member)) for member in unlike]
    near: list[tuple[int, ...]] = []
    while True:  # a best path that differs from those that matter, until it differs from all
        levels = levels_of_labels(stages, scores, Unlike(forms=tuple(near), least=least_changes if near else 0))
        if not len(levels[-1].score):
            return None
        found = _optimum(stages, levels, int(np.argmin(levels[-1].score)))
        missed = [forms for forms in others if _num_changes(stages, found, forms) < least_changes]
        if not missed:
            return found
        near.append(missed[0])


def diverse(stages: Stages, scores: Scores, num: int, *, least_changes: int) -> list[Optimum]:
    """The best member, then the best that differs from it in at least so many layers, then from both, up to `num`."""
    found: list[Optimum] = []
    members: list[Member] = []
    while len(found) < num:
        one = best(stages, scores, unlike=members, least_changes=least_changes)
        if one is None:
            break
        found.append(one)
        members.append(member_of_optimum(stages, one))
    return found


def frontier(stages: Stages, scores: Scores) -> list[Optimum]:
    """For every price within the budget, the member of least score: those that none is as cheap and as good as.

    Cheapest first, scores falling. Where both latency and bytes have a budget, they count alike: none is as good in
    all three. Raises UserError for scores that do not fit.
    """
    levels = levels_of_labels(stages, checked(stages, scores))
    last = levels[-1]
    rows = np.flatnonzero(nondominated_rows(last.cost, last.score))
    order = rows[np.lexsort((last.cost[rows, 1], last.cost[rows, 0]))]
    return [_optimum(stages, levels, int(row)) for row in order]


def member_of_optimum(stages: Stages, one: Optimum, *, entropy_regularised: bool | None = None) -> Member:
    """The member of the space with these layers; unless one is asked for, with the first recipe of the space."""
    space = stages.feasible.space
    recipe = space.recipes[0] if entropy_regularised is None else entropy_regularised
    return member_of(space, one.layers, entropy_regularised=recipe)


def _num_changes(stages: Stages, one: Optimum, forms: Sequence[int]) -> int:
    """In how many layers a path differs, as priced, from another."""
    own = forms_of(stages, member_of_optimum(stages, one))
    return sum(mine != theirs for mine, theirs in zip(own, forms, strict=True))


def _optimum(stages: Stages, levels: Sequence[Labels], index: int) -> Optimum:
    last = levels[-1]
    layers = tuple(stages.layers[number] for number in layers_to(levels, index))
    latency, sent = (int(units) for units in last.cost[index])
    return Optimum(layers=layers, score=float(last.score[index]), cost=(latency, sent))
