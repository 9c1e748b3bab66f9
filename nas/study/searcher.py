"""Which candidates to train next: strategies as pure functions of a generator and of results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nas.results.pareto import Point, ranks
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import cheapest, most_expensive, price_of
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
        """At most `size` new members within budget; fewer only when the space holds no more."""


class RandomSearch(Strategy):
    """Uniform over the members within budget, without repetition."""

    def __init__(self, feasible: FeasibleSpace) -> None:
        self.feasible = feasible

    def propose(
        self, size: int, rng: np.random.Generator, seen: frozenset[Member], scored: Sequence[Scored]
    ) -> list[Member]:
        return _fill([], size, self.feasible, rng, seen)


class Evolution(Strategy):
    """Anchors first, then mutation and crossover of the front so far, spread over the whole range of latencies.

    Each offspring has a latency target, uniform between the cheapest member and the budget; of CHOICES draws the
    nearest is taken. Without it nearly all offspring crowd at the budget, where nearly all members are.
    """

    def __init__(self, feasible: FeasibleSpace, anchors: Iterable[Member]) -> None:
        self.feasible = feasible
        self.anchors = tuple(anchors)
        self.cheapest_s = self._latency_s(cheapest(feasible.priced))
        self.most_expensive_s = self._latency_s(most_expensive(feasible.priced))

    def propose(
        self, size: int, rng: np.random.Generator, seen: frozenset[Member], scored: Sequence[Scored]
    ) -> list[Member]:
        chosen = [member for member in self.anchors if member not in seen][:size]
        parents = _parents(scored)
        for _ in range(size - len(chosen) if parents else 0):
            drawn = [self._child(parents, rng) for _ in range(CHOICES)]
            new = [child for child in drawn if self.feasible.fits(child) and child not in seen | {*chosen}]
            target_s = rng.uniform(self.cheapest_s, self.feasible.budget.latency_s or self.most_expensive_s)
            if new:
                chosen.append(min(new, key=lambda child: abs(self._latency_s(child) - target_s)))
        return _fill(chosen, size, self.feasible, rng, seen)

    def _latency_s(self, member: Member) -> float:
        return price_of(self.feasible.priced, member).latency_s

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


def _fill(
    chosen: list[Member], size: int, feasible: FeasibleSpace, rng: np.random.Generator, seen: frozenset[Member]
) -> list[Member]:
    """Adds uniform members within budget that are new, until there are `size` or the space is used up."""
    new = set(chosen)
    left = feasible.num_feasible - sum(feasible.fits(member) for member in seen | new)
    while len(chosen) < size and left > 0:
        member = feasible.sample(rng)
        if member not in seen and member not in new:
            chosen.append(member)
            new.add(member)
            left -= 1
    return chosen
