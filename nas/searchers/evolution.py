"""Evolution: mutation and crossover of members of the best fronts so far, spread over costs."""

from collections.abc import Collection, Iterable, Sequence
from typing import final

import numpy as np

from nas.run.pareto import ranks
from nas.searchers.draws import Draws
from nas.searchers.strategy import Observation, SearchProblem, Strategy, points_of
from search_spaces.notation import Member
from search_spaces.variation import crossover, mutate

PARENTS = 4  # whole fronts are taken, best first, until they have at least this many members together
CROSSOVER_SHARE = 0.5
CHOICES = 16  # offspring drawn for each proposal; the one nearest to its latency target is taken


@final
class Evolution(Strategy):
    """Proposes draws that are even over costs, then offspring of the best fronts so far.

    Each offspring has a latency target, uniform in the slice of latency with the fewest members that completed or were
    just chosen. Of CHOICES draws, the new one nearest to the target is taken. Without targets, most offspring would
    cost nearly the budget.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self.feasible, self.draws = problem.feasible, Draws(problem.feasible)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation]
    ) -> list[Member]:
        chosen: list[Member] = []
        parents = _parents(trained)
        completed = [member for member, _ in points_of(trained)]
        for _ in range(size if parents else 0):
            drawn = [self._child(parents, rng) for _ in range(CHOICES)]
            emptiest = self.draws.slices[self.draws.emptiest([*completed, *chosen], rng)[0]]
            target_s = rng.uniform(*emptiest.latency_s_bounds)
            if new := self.draws.new_of(drawn, [*seen, *chosen]):
                chosen.append(min(new, key=lambda child: abs(self.draws.place_of(child).latency_s - target_s)))
        return self.draws.filled(chosen, size, rng, seen)

    def _child(self, parents: Sequence[Member], rng: np.random.Generator) -> Member:
        first, second = (parents[int(rng.integers(len(parents)))] for _ in range(2))
        if rng.random() < CROSSOVER_SHARE:
            return crossover(self.feasible.space, first, second, rng)
        return mutate(self.feasible.space, first, rng)


def _parents(trained: Iterable[Observation]) -> list[Member]:
    """Return the members of the best fronts, whole fronts at a time, until there are PARENTS of them."""
    points = points_of(list(trained))
    order = ranks([point for _, point in points])
    parents: list[Member] = []
    for rank in sorted(set(order)):
        if len(parents) < PARENTS:
            parents += [member for (member, _), its_rank in zip(points, order, strict=True) if its_rank == rank]
    return parents
