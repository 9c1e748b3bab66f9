"""A search replayed on a table of trainings: what it finds for the tokens that it trains, at no cost.

A training that a searcher asks for is one of the table's, of a seed drawn at random. What it has found by then, the
front of what it saw, is scored by the means over all seeds, and so is the front of the whole table, so that luck counts
for nobody. Proposals come in generations with the lag of a search, trials are stopped at rungs as it stops them, and
every searcher has the same exact budget.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from experiments.trainings import Rung
from nas.recipe.recipe import SCALES
from nas.run.config import LOOKS
from nas.run.pareto import Point, hypervolume, nondominated, ranks
from nas.searchers.strategy import Observation, SearchProblem, searcher_of
from nas.searchers.uniform import Stratified
from nas.study.schedule import TrialSchedule
from search_spaces.budget.feasible import FeasibleSpace, price_slices
from search_spaces.notation import Member

NUM_SLICES = 4
FIRST_RUNG = SCALES["proxy"].rungs[0]  # share of the tokens that a look takes
BRACKET = 8  # candidates of successive halving that begin together


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
        known = [training.loss for training in self.trainings if training.loss is not None]
        return (self.latency_s, statistics.fmean(known)) if len(known) == len(self.trainings) else None


class Curve(NamedTuple):
    """One replayed search: trained tokens and share of the whole table's hypervolume after every training; and, of each
    slice of the price at the end, the best mean loss found."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    best: tuple[float | None, ...]


def replay(searcher: str, problem: SearchProblem, entries: Mapping[Member, Entry], num_trials: int, seed: int) -> Curve:
    """One search, until it has trained as many tokens as so many full trainings have, or all of the table."""
    strategy = searcher_of(searcher)(problem)
    share = FIRST_RUNG * LOOKS + (1 - FIRST_RUNG) if strategy.takes_looks else 1.0  # of a training, for each that ends
    schedule = TrialSchedule(
        strategy=strategy,
        seed=seed,
        num_trials=round(num_trials / share),
        num_looks=round(LOOKS * num_trials / share),
        reference=reference_of(problem),
        parent_loss=problem.parent_loss,
    )
    rng, progress = np.random.default_rng([seed, 1]), Progress(problem, entries)
    drawn: dict[int, Training] = {}
    most_tokens = budget_of(entries, num_trials)
    while progress.tokens < most_tokens and (proposal := schedule.ask()) is not None:
        entry = entries[proposal.member]
        begun = proposal.index in drawn
        training = drawn.setdefault(proposal.index, entry.trainings[int(rng.integers(len(entry.trainings)))])
        observed = Observation(
            member=entry.member,
            index=proposal.index,
            status="completed" if training.loss is not None else "diverged",
            latency_s=entry.latency_s,
            log_perplexity=training.loss,
            rung_losses=tuple(rung.loss for rung in training.rungs),
        )
        if proposal.is_look and training.rungs:
            progress.stopped(training, FIRST_RUNG)
            observed = replace(observed, status="paused", log_perplexity=None, rung_losses=observed.rung_losses[:1])
        else:
            progress.add(entry, training, begun=begun)
        schedule.tell(observed)
        progress.score()
    return progress.curve()


def budget_of(entries: Mapping[Member, Entry], num_trials: int) -> int:
    """Tokens of so many full trainings."""
    return num_trials * max(training.tokens for entry in entries.values() for training in entry.trainings)


class Progress:
    """What a replayed search has seen and spent so far. tokens: trained by it."""

    def __init__(self, problem: SearchProblem, entries: Mapping[Member, Entry]) -> None:
        self.problem, self.reference = problem, reference_of(problem)
        self.whole = hypervolume(_means(entries.values()), self.reference)
        self.tokens = 0
        self._seen: list[tuple[Entry, Point]] = []
        self._scored: list[tuple[int, float]] = []

    def add(self, entry: Entry, training: Training, *, begun: bool = False) -> None:
        """A training to its end. begun: from its first rung on."""
        self.tokens += training.tokens - (round(training.tokens * FIRST_RUNG) if begun else 0)
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


def best_by_slice(feasible: FeasibleSpace, entries: Sequence[Entry]) -> list[float | None]:
    """The least mean loss in each slice of the price, None where there is none."""
    best: list[float | None] = []
    for part in price_slices(feasible, NUM_SLICES):
        losses = [entry.point[1] for entry in entries if entry.point is not None and part.fits(entry.member)]
        best.append(min(losses, default=None))
    return best


def _means(entries: Iterable[Entry]) -> list[Point]:
    return [point for entry in entries if (point := entry.point) is not None]


class _Going(NamedTuple):
    entry: Entry
    training: Training


def replay_halving(problem: SearchProblem, entries: Mapping[Member, Entry], num_trials: int, seed: int) -> Curve:
    """Successive halving, replayed: many candidates are trained for a while, and the better half of them goes on.

    A bracket is BRACKET candidates, drawn evenly over prices. After each rung half of it goes on: those on the best
    fronts of price and loss at that rung, among all that came so far. Brackets follow until as many tokens are trained
    as of so many full trainings, or the table is used up.

    Source: Jamieson and Talwalkar 2016, arXiv 1502.07943, for halving; Li et al. 2020, arXiv 1810.05934, for ranking
    among all that reached the rung; Schmucker et al. 2021, arXiv 2106.12639, for fronts in place of a single loss.
    """
    rng, strategy = np.random.default_rng([seed, 2]), Stratified(problem)
    progress, seen, at_rungs = Progress(problem, entries), list[Member](), dict[float, list[Point]]()
    most_tokens = budget_of(entries, num_trials)
    while progress.tokens < most_tokens and (members := strategy.propose(BRACKET, rng, seen, [])):
        seen += members
        drawn = [entries[member] for member in members]
        going = [_Going(entry, entry.trainings[int(rng.integers(len(entry.trainings)))]) for entry in drawn]
        shares = [share for share, _ in max((trial.training.rungs for trial in going), key=len)]
        for place, share in enumerate(shares):
            for trial in going:
                if place >= len(trial.training.rungs):
                    progress.add(trial.entry, trial.training)  # it diverged before
            going = [trial for trial in going if place < len(trial.training.rungs)]
            points = [(trial.entry.latency_s, trial.training.rungs[place].loss) for trial in going]
            order = ranks([*points, *at_rungs.setdefault(share, [])])[: len(points)]
            at_rungs[share] += points
            best = sorted(range(len(going)), key=order.__getitem__)[: BRACKET // 2 ** (place + 1)]
            for number, trial in enumerate(going):
                if number not in best:
                    progress.stopped(trial.training, share)
            going = [going[number] for number in sorted(best)]
        for trial in going:
            progress.add(trial.entry, trial.training)
        progress.score()
    return progress.curve()
