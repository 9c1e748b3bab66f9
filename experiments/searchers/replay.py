"""A search replayed on a table of trainings: what it finds for the tokens that it trains, at no cost.

A training that a searcher asks for is one of the table's, of a seed drawn at random. What it has found by then, the
front of what it saw, is scored by the means over all seeds, and so is the front of the whole table, so that luck counts
for nobody. Proposals come in generations with the lag of a search, trials are stopped at rungs as it stops them, and
every searcher has the same exact budget.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.trainings import Rung
from nas.run.ledger import Status
from nas.run.pareto import Point, hypervolume, nondominated
from nas.searchers.strategy import SearchProblem, searcher_of
from nas.study.early_stop import dominated_at_rung
from nas.study.finalists import Result
from nas.study.schedule import TrialSchedule
from search_spaces.budget.feasible import FeasibleSpace, price_slices
from search_spaces.notation import Member

NUM_SLICES = 4


class Training(NamedTuple):
    """loss: nats, None if it diverged. tokens: of all of it. rungs: losses on its way, nats."""

    loss: float | None
    tokens: int
    rungs: tuple[Rung, ...] = ()


class Entry(NamedTuple):
    """One architecture of the table, its trainings by seed."""

    member: Member
    latency_s: float
    trainings: tuple[Training, ...]

    @property
    def point(self) -> Point | None:
        """Price and mean loss; None if a seed diverged."""
        known = [one.loss for one in self.trainings if one.loss is not None]
        return (self.latency_s, statistics.fmean(known)) if len(known) == len(self.trainings) else None


class Curve(NamedTuple):
    """One replayed search: trained tokens and share of the whole table's hypervolume after every training; and, of each
    slice of the price at the end, the best mean loss found."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    best: tuple[float | None, ...]


def replay(searcher: str, problem: SearchProblem, entries: Mapping[Member, Entry], num_trials: int, seed: int) -> Curve:
    """One search, until it has trained as many tokens as so many full trainings have, or all of the table."""
    schedule = TrialSchedule(strategy=searcher_of(searcher)(problem), seed=seed, num_trials=len(entries))
    rng, found, most_tokens = np.random.default_rng([seed, 1]), Found(problem, entries), budget_of(entries, num_trials)
    while found.tokens < most_tokens and (proposal := schedule.ask()) is not None:
        entry = entries[proposal.member]
        training = entry.trainings[int(rng.integers(len(entry.trainings)))]
        stopped_at = _stopped_at(entry, training, schedule.rivals(proposal))
        if stopped_at is None:
            found.add(entry, training)
        else:
            found.stopped(training, training.rungs[stopped_at].share)
        schedule.tell(_result(proposal.index, entry, training, stopped_at))
        found.score()
    return found.curve()


def _result(index: int, entry: Entry, training: Training, stopped_at: int | None) -> Result:
    """What a schedule is told. stopped_at: the number of a rung."""
    rung_losses = tuple(rung.loss for rung in training.rungs)
    if stopped_at is not None:
        passed = rung_losses[: stopped_at + 1]
        return Result(index=index, status="stopped", latency_s=entry.latency_s, log_perplexity=None, rung_losses=passed)
    status: Status = "diverged" if training.loss is None else "completed"
    return Result(
        index=index,
        status=status,
        latency_s=entry.latency_s,
        log_perplexity=training.loss,
        rung_losses=rung_losses,
    )


def budget_of(entries: Mapping[Member, Entry], num_trials: int) -> int:
    """Tokens of so many full trainings."""
    return num_trials * max(one.tokens for entry in entries.values() for one in entry.trainings)


def _stopped_at(entry: Entry, training: Training, rivals: Sequence[Result]) -> int | None:
    """The rung at which a search would stop it, None if it goes on to its end."""
    dominated = (
        number
        for number, rung in enumerate(training.rungs)
        if dominated_at_rung(number, entry.latency_s, rung.loss, rivals)
    )
    return next(dominated, None)


class Found:
    """What a replayed search has seen and spent so far. tokens: trained by it."""

    def __init__(self, problem: SearchProblem, entries: Mapping[Member, Entry]) -> None:
        self.problem, self.reference = problem, reference_of(problem)
        self.whole = hypervolume(_means(entries.values()), self.reference)
        self.tokens = 0
        self._seen: list[tuple[Entry, Point]] = []
        self._scored: list[tuple[int, float]] = []

    def add(self, entry: Entry, training: Training) -> None:
        """A training from its beginning to its end."""
        self.tokens += training.tokens
        if training.loss is not None:
            self._seen.append((entry, (entry.latency_s, training.loss)))

    def stopped(self, training: Training, share: float) -> None:
        """A training that went on for a share of its tokens only."""
        self.tokens += round(training.tokens * share)

    def score(self) -> None:
        """Writes down what share of the whole hypervolume the front so far has."""
        self._scored.append((self.tokens, hypervolume(_means(self._front()), self.reference) / self.whole))

    def curve(self) -> Curve:
        tokens, shares = zip(*self._scored, strict=True)
        return Curve(tokens, shares, tuple(best_by_slice(self.problem.feasible, self._front())))

    def _front(self) -> list[Entry]:
        kept = nondominated([point for _, point in self._seen])
        return [entry for (entry, _), keep in zip(self._seen, kept, strict=True) if keep]


def reference_of(problem: SearchProblem) -> Point:
    """The budget, and what a model without context loses."""
    assert problem.feasible.budget.latency_s is not None
    return problem.feasible.budget.latency_s, problem.reference_loss


def best_by_slice(feasible: FeasibleSpace, found: Sequence[Entry]) -> list[float | None]:
    """The least mean loss in each slice of the price, None where there is none."""
    best: list[float | None] = []
    for part in price_slices(feasible, NUM_SLICES):
        losses = [entry.point[1] for entry in found if entry.point is not None and part.fits(entry.member)]
        best.append(min(losses, default=None))
    return best


def _means(entries: Iterable[Entry]) -> list[Point]:
    return [point for entry in entries if (point := entry.point) is not None]
