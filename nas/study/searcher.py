"""Which candidates to train next: strategies as pure functions, behind an ask/tell schedule.

Reproducible by construction: proposals come in generations of a fixed size, and generation g depends only on the
seed, on g and on the results of generations up to g - 2. The lag of one generation keeps every worker busy while
a generation finishes, and arrival order never matters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nas.results.ledger import Role, Status
from nas.results.pareto import Point, dominates, ranks
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import cheapest, most_expensive, price_of
from search_spaces.notation import Member
from search_spaces.variation import crossover, mutate

SearcherName = Literal["evolution", "random"]

GENERATION_SIZE = 4  # two workers finish a generation in two rounds; larger ones learn later, smaller ones idle
LAG = 2  # generation g sees the results of generations up to g - LAG

PARENTS = 4  # fronts are taken, best first, until there are this many parents
CROSSOVER_SHARE = 0.5
CHOICES = 16  # offspring drawn for a place, of which the one nearest to its latency target is taken
MIN_RIVALS = 8  # trials that must have completed before any is stopped early: luck dominates among fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A candidate to train. `index` numbers proposals in order; baselines are for comparison only."""

    index: int
    generation: int
    role: Role
    member: Member


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a trial ended. log_perplexity is None unless it completed; rung_losses are nats per token, by rung."""

    index: int
    status: Status
    latency_s: float
    log_perplexity: float | None
    rung_losses: tuple[float, ...] = ()


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


class TrialSchedule:
    """Ask for the next proposal, tell how it ended; knows the generations and the lag."""

    def __init__(self, *, strategy: Strategy, seed: int, num_trials: int, baselines: Sequence[Member] = ()) -> None:
        self.strategy = strategy
        self.seed = seed
        self.num_trials = num_trials
        self.proposals: list[Proposal] = []
        self.results: dict[int, Result] = {}
        self._asked = 0
        self._generation = 0
        self._exhausted = False
        for member in baselines:
            self._add(member, generation=0, role="baseline")

    def ask(self) -> Proposal | None:
        """The next proposal, or None: nothing until more results are told, or nothing at all (`finished`)."""
        if self._asked == len(self.proposals) and not self._extend():
            return None
        proposal = self.proposals[self._asked]
        self._asked += 1
        return proposal

    def tell(self, result: Result) -> None:
        self.results[result.index] = result

    @property
    def num_candidates(self) -> int:
        return sum(proposal.role == "candidate" for proposal in self.proposals)

    @property
    def finished(self) -> bool:
        """Whether every trial there will ever be has been asked for."""
        return self._asked == len(self.proposals) and (self._exhausted or self.num_candidates >= self.num_trials)

    def rivals(self, proposal: Proposal) -> tuple[Result, ...]:
        """The results an early stop of this trial may depend on: candidates of generations it may see.

        None until MIN_RIVALS of them have completed.
        """
        visible = tuple(
            self.results[earlier.index]
            for earlier in self.proposals
            if earlier.role == "candidate" and earlier.generation <= proposal.generation - LAG
        )
        return visible if sum(one.status == "completed" for one in visible) >= MIN_RIVALS else ()

    def _extend(self) -> bool:
        """Proposes the next generation if there is to be one and it may be known; says whether it did."""
        if self.finished or not self._visible():
            return False
        generation, rng = self._generation, np.random.default_rng([self.seed, self._generation])
        seen = frozenset(proposal.member for proposal in self.proposals)
        members = self.strategy.propose(GENERATION_SIZE, rng, seen, self._scored())
        self._exhausted = len(members) < GENERATION_SIZE
        for member in members[: self.num_trials - self.num_candidates]:
            self._add(member, generation=generation, role="candidate")
        self._generation += 1
        return bool(members)

    def _visible(self) -> bool:
        """Whether every result the next generation depends on has been told."""
        return all(
            proposal.index in self.results
            for proposal in self.proposals
            if proposal.generation <= self._generation - LAG
        )

    def _scored(self) -> list[Scored]:
        scored = []
        for proposal in self.proposals:
            result = self.results.get(proposal.index)
            visible = proposal.role == "candidate" and proposal.generation <= self._generation - LAG
            if visible and result is not None and result.log_perplexity is not None:
                point = (result.latency_s, result.log_perplexity)
                scored.append(Scored(member=proposal.member, point=point))
        return scored

    def _add(self, member: Member, *, generation: int, role: Role) -> None:
        self.proposals.append(Proposal(index=len(self.proposals), generation=generation, role=role, member=member))


def dominated_at_rung(rung: int, latency_s: float, val_loss: float, rivals: Iterable[Result]) -> bool:
    """Whether an earlier trial was at least as cheap and as good at this rung, and better in one of the two.

    Only then is a trial stopped early, so the cheap end of the front survives whatever its loss.
    """
    point = (latency_s, val_loss)
    return any(
        dominates((rival.latency_s, rival.rung_losses[rung]), point)
        for rival in rivals
        if rung < len(rival.rung_losses)
    )
