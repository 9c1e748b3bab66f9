"""Searchers that do not learn from results: uniform draws, and uniform draws within slices of cost."""

from collections.abc import Collection, Sequence
from typing import final

import numpy as np

from nas.searchers.draws import TRIES, Draws
from nas.searchers.strategy import Observation, SearchProblem, Strategy
from search_spaces.notation import Member


@final
class Stratified(Strategy):
    """Draws new members, each from the slice of latency with the fewest members drawn so far (`Draws.filled`)."""

    def __init__(self, problem: SearchProblem) -> None:
        self.draws = Draws(problem.feasible)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation]
    ) -> list[Member]:
        return self.draws.filled([], size, rng, seen)


@final
class Uniform(Strategy):
    """Draws uniformly from the members within the budget, nearly all of which cost almost the whole budget.

    If that yields too few new members, `Draws.filled` adds others.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self.feasible, self.draws = problem.feasible, Draws(problem.feasible)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation]
    ) -> list[Member]:
        drawn = [self.feasible.sample(rng) for _ in range(size * TRIES)]
        return self.draws.filled(self.draws.new_of(drawn, seen)[:size], size, rng, seen)
