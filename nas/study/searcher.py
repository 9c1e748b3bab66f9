"""Which candidates to train next: strategies as pure functions of a generator and of results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nas.results.pareto import Point, ranks
from nas.study.draws import Draws
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import price_of
from search_spaces.notation import Member
from search_spaces.variation import crossover, mutate

SearcherName = Literal["evolution", "random"]

PARENTS = 4  # fronts are taken, best first, until there are this many parents
CROSSOVER_SHARE = 0.5
CHOICES = 16  # offspring drawn for a place, of which the one nearest to its latency target is taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A member trained to full fidelity, with its point (latency_s, log perplexity)."""

    member: Member
    point: Point


class Strategy(ABC):
    """Proposes the members of one generation."""

    @abstractmethod
    def propose(
        self, size: int, rng: np.random.Generator, seen: frozenset[Member], scored: Sequence[Scored]
    ) -> list[Member]:
        """At most `size` members within budget, none of which deploys as one seen does; fewer only if none is found."""


class RandomSearch(Strategy):
    """Uniform within slices of the price, without repetition."""

    def __init__(self, feasible: FeasibleSpace) -> None:
        self.draws = Draws(feasible)

    def propose(
        self, size: int, rng: np.random.Generator, seen: frozenset[Member], scored: Sequence[Scored]
    ) -> list[Member]:
        return self.draws.filled([], size, rng, seen)


class Evolution(Strategy):
    """Anchors first, then mutation and crossover of the front so far, spread over the whole range of latencies.

    Each offspring has a latency target, uniform in the slice of the price with the fewest trained members; of CHOICES
    draws the nearest is taken. Without it nearly all offspring crowd at the budget, where nearly all members are.
    """

    def __init__(self, feasible: FeasibleSpace, anchors: Iterable[Member]) -> None:
        self.feasible = feasible
        self.draws = Draws(feasible)
        self.anchors = tuple(anchors)

    def propose(
        self, size: int, rng: np.random.Generator, seen: frozenset[Member], scored: Sequence[Scored]
    ) -> list[Member]:
        chosen = self.draws.new_of(self.anchors, seen)[:size]
        parents = _parents(scored)
        for _ in range(size - len(chosen) if parents else 0):
            drawn = [self._child(parents, rng) for _ in range(CHOICES)]
            target_s = self._target_s([*(one.member for one in scored), *chosen], rng)
            if new := self.draws.new_of(drawn, [*seen, *chosen]):
                chosen.append(min(new, key=lambda child: abs(self._latency_s(child) - target_s)))
        return self.draws.filled(chosen, size, rng, seen)

    def _latency_s(self, member: Member) -> float:
        return price_of(self.feasible.priced, member).latency_s

    def _target_s(self, trained: Sequence[Member], rng: np.random.Generator) -> float:
        return rng.uniform(*self.draws.slices[self.draws.emptiest(trained, rng)[0]].latency_s_bounds)

    def _child(self, parents: Sequence[Member], rng: np.random.Generator) -> Member:
        first, second = (parents[int(rng.integers(len(parents)))] for _ in range(2))
        if rng.random() < CROSSOVER_SHARE:
            return crossover(self.feasible.space, first, second, rng)
        return mutate(self.feasible.space, first, rng)


SEARCHERS: dict[SearcherName, Callable[[FeasibleSpace, Iterable[Member]], Strategy]] = {
    "evolution": Evolution,
    "random": lambda feasible, anchors: RandomSearch(feasible),
}


def _parents(scored: Sequence[Scored]) -> list[Member]:
    """The members of the best fronts, whole fronts at a time, until there are PARENTS of them."""
    order = ranks([one.point for one in scored])
    parents: list[Member] = []
    for rank in sorted(set(order)):
        if len(parents) >= PARENTS:
            break
        parents += [one.member for one, its_rank in zip(scored, order, strict=True) if its_rank == rank]
    return parents
