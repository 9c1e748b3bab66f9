"""Searchers that learn nothing from results: uniform draws and uniform within slices of the price."""

from collections.abc import Collection, Sequence
from typing import final

import numpy as np

from nas.searchers.draws import TRIES, Draws
from nas.searchers.strategy import Observation, SearchProblem, Strategy
from search_spaces.notation import Member


@final
class Stratified(Strategy):
    """Uniform within slices of the price, the ones with the fewest members first, without repetition."""

    def __init__(self, problem: SearchProblem) -> None:
        self.draws = Draws(problem.feasible)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation]
    ) -> list[Member]:
        return self.draws.filled([], size, rng, seen)


@final
class Uniform(Strategy):
    """Uniform over the members within the budget, nearly all of which cost nearly all of it."""

    def __init__(self, problem: SearchProblem) -> None:
        self.feasible, self.draws = problem.feasible, Draws(problem.feasible)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation]
    ) -> list[Member]:
        drawn = [self.feasible.sample(rng) for _ in range(size * TRIES)]
        return self.draws.filled(self.draws.new_of(drawn, seen)[:size], size, rng, seen)
