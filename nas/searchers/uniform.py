"""Searchers that learn nothing from results: uniform draws, uniform within slices of the price, cheapest first."""

from collections.abc import Collection, Iterator, Sequence
from typing import final

import numpy as np

from nas.searchers.draws import TRIES, Draws
from nas.searchers.strategy import SearchProblem, Strategy, Trained
from search_spaces.notation import Member
from search_spaces.optima.cheapest_first import cheapest_first
from search_spaces.optima.stages import stages_of


@final
class Stratified(Strategy):
    """Uniform within slices of the price, the ones with the fewest members first, without repetition."""

    def __init__(self, problem: SearchProblem) -> None:
        self.draws = Draws(problem.feasible)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Trained]
    ) -> list[Member]:
        return self.draws.filled([], size, rng, seen)


@final
class Uniform(Strategy):
    """Uniform over the members within the budget, nearly all of which cost nearly all of it."""

    def __init__(self, problem: SearchProblem) -> None:
        self.feasible, self.draws = problem.feasible, Draws(problem.feasible)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Trained]
    ) -> list[Member]:
        drawn = [self.feasible.sample(rng) for _ in range(size * TRIES)]
        return self.draws.filled(self.draws.new_of(drawn, seen)[:size], size, rng, seen)


@final
class CheapestFirst(Strategy):
    """The cheapest member whose deployed form is new, then the next, up to the budget."""

    def __init__(self, problem: SearchProblem) -> None:
        self.draws = Draws(problem.feasible)
        self._walked, self._rest = list[Member](), cheapest_first(stages_of(problem.feasible))

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Trained]
    ) -> list[Member]:
        forms, chosen = {self.draws.place_of(member).form for member in seen}, list[Member]()
        for member in self._ascending():
            if len(chosen) == size:
                break
            place = self.draws.place_of(member)
            if place.fits and place.form not in forms:
                forms.add(place.form)
                chosen.append(member)
        return self.draws.filled(chosen, size, rng, seen)

    def _ascending(self) -> Iterator[Member]:
        """Members by price; what was walked before is remembered."""
        yield from self._walked
        for member in self._rest:
            self._walked.append(member)
            yield member
