"""Replays a search on a table of trainings, which shows without training what the search finds per trained token.

A training that a searcher asks for is taken from the table, with a random seed. The front that a searcher has found is
scored by means over all seeds, as the table's front is, so that lucky seeds do not count. Proposals come in generations
with the lag of a real search (`nas.study.schedule`), trials stop at its rungs, and all searchers have equal budgets.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from experiments.trainings import Rung
from nas.recipe.recipe import SCALES
from nas.run.config import PROXY_EVALS
from nas.run.pareto import Point, hypervolume, nondominated, ranks
from nas.searchers.strategy import Observation, SearchProblem, searcher_of
from nas.searchers.uniform import Stratified
from nas.study.schedule import TrialSchedule
from search_spaces.budget.feasible import FeasibleSpace, price_slices
from search_spaces.notation import Member

NUM_SLICES = 4
FIRST_RUNG = SCALES["proxy"].rungs[0]  # share of the tokens in a low-fidelity evaluation
HALVING = "halving"  # has its own schedule, without ask and tell
BRACKET = 8  # candidates that start together in successive halving


class Training(NamedTuple):
    """A training. loss: final loss in nats per token; None if it diverged. rungs: earlier validations."""

    loss: float | None
    tokens: int
    rungs: tuple[Rung, ...] = ()


class Entry(NamedTuple):
    """One architecture of the table, with one training for each seed."""

    member: Member
    latency_s: float
    trainings: tuple[Training, ...]

    @property
    def point(self) -> Point | None:
        """Latency in seconds and mean loss in nats; None if a seed diverged."""
        known = [training.loss for training in self.trainings if training.loss is not None]
        return (self.latency_s, statistics.fmean(known)) if len(known) == len(self.trainings) else None


class Curve(NamedTuple):
    """A replayed search: trained tokens and share of the table's hypervolume, after each training (halving: bracket).

    best: least mean loss, in nats, on the final front in each slice of the cost; None for a slice without a member.
    """

    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    best: tuple[float | None, ...]


def replay(searcher: str, problem: SearchProblem, entries: Mapping[Member, Entry], num_trials: int, seed: int) -> Curve:
    """Replay a search until it has used the tokens of `num_trials` full trainings, or has nothing left to ask for."""
    if searcher == HALVING:
        return replay_halving(problem, entries, num_trials, seed)
    strategy = searcher_of(searcher)(problem)
    # share of the tokens of a full training, per final training
    share = FIRST_RUNG * PROXY_EVALS + (1 - FIRST_RUNG) if strategy.takes_proxies else 1.0
    schedule = TrialSchedule(
        strategy=strategy,
        seed=seed,
        num_trials=round(num_trials / share),
        num_proxy_evals=round(PROXY_EVALS * num_trials / share),
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
        if proposal.is_proxy and training.rungs:
            progress.stopped(training, FIRST_RUNG)
            observed = replace(observed, status="paused", log_perplexity=None, rung_losses=observed.rung_losses[:1])
        else:
            progress.add(entry, training, begun=begun)
        schedule.tell(observed)
        progress.score()
    return progress.curve()


def budget_of(entries: Mapping[Member, Entry], num_trials: int) -> int:
    """Return the number of tokens of `num_trials` full trainings, each as long as the longest in the table."""
    return num_trials * max(training.tokens for entry in entries.values() for training in entry.trainings)


class Progress:
    """What a replayed search has found so far. tokens: number of trained tokens. whole: hypervolume of the table."""

    def __init__(self, problem: SearchProblem, entries: Mapping[Member, Entry]) -> None:
        self.problem, self.reference = problem, reference_of(problem)
        self.whole = hypervolume(_means(entries.values()), self.reference)
        self.tokens = 0
        self._seen: list[tuple[Entry, Point]] = []
        self._scored: list[tuple[int, float]] = []

    def add(self, entry: Entry, training: Training, *, begun: bool = False) -> None:
        """Record a whole training. begun: whether its tokens up to the first rung are already counted."""
        self.tokens += training.tokens - (round(training.tokens * FIRST_RUNG) if begun else 0)
        if training.loss is not None:
            self._seen.append((entry, (entry.latency_s, training.loss)))

    def stopped(self, training: Training, share: float) -> None:
        """Record a training that stopped after a share of its tokens."""
        self.tokens += round(training.tokens * share)

    def score(self) -> None:
        """Record the share of the table's hypervolume that the front found so far has."""
        self._scored.append((self.tokens, hypervolume(_means(self._front()), self.reference) / self.whole))

    def curve(self) -> Curve:
        tokens, shares = zip(*self._scored, strict=True)
        return Curve(tokens, shares, tuple(best_by_slice(self.problem.feasible, self._front())))

    def _front(self) -> list[Entry]:
        kept = nondominated([point for _, point in self._seen])
        return [entry for (entry, _), keep in zip(self._seen, kept, strict=True) if keep]


def reference_of(problem: SearchProblem) -> Point:
    """Return the reference point of the hypervolume: the budget in seconds, and the unigram baseline's loss in nats."""
    assert problem.feasible.budget.latency_s is not None
    return problem.feasible.budget.latency_s, problem.reference_loss


def best_by_slice(feasible: FeasibleSpace, entries: Sequence[Entry]) -> list[float | None]:
    """Return the least mean loss, nats, in each of up to NUM_SLICES slices of the cost; None if no entry has one."""
    return [
        min((entry.point[1] for entry in entries if entry.point and part.fits(entry.member)), default=None)
        for part in price_slices(feasible, NUM_SLICES)
    ]


def _means(entries: Iterable[Entry]) -> list[Point]:
    return [point for entry in entries if (point := entry.point) is not None]


def replay_halving(problem: SearchProblem, entries: Mapping[Member, Entry], num_trials: int, seed: int) -> Curve:
    """Replay successive halving: many candidates are trained up to a rung, and the better half continues.

    A bracket has BRACKET candidates, drawn evenly over costs. After the first rung at most BRACKET / 2 continue, after
    the second BRACKET / 4, and so on: those on the best fronts of cost and loss among all candidates that reached the
    rung so far. Brackets follow until the tokens of `num_trials` full trainings or all members are used.

    Source: Jamieson and Talwalkar 2016, arXiv 1502.07943, for halving; Li et al. 2020, arXiv 1810.05934, for ranking
    among all that reached the rung; Schmucker et al. 2021, arXiv 2106.12639, for fronts in place of a single loss.
    """
    rng, strategy = np.random.default_rng([seed, 2]), Stratified(problem)
    progress, seen, at_rungs = Progress(problem, entries), list[Member](), dict[float, list[Point]]()
    most_tokens = budget_of(entries, num_trials)
    while progress.tokens < most_tokens and (members := strategy.propose(BRACKET, rng, seen, [])):
        seen += members
        drawn = [entries[member] for member in members]
        going = [(entry, entry.trainings[int(rng.integers(len(entry.trainings)))]) for entry in drawn]
        shares = [share for share, _ in max((training.rungs for _, training in going), key=len)]
        for place, share in enumerate(shares):
            for entry, training in going:
                if place >= len(training.rungs):
                    progress.add(entry, training)  # it diverged earlier
            going = [(entry, training) for entry, training in going if place < len(training.rungs)]
            points = [(entry.latency_s, training.rungs[place].loss) for entry, training in going]
            order = ranks([*points, *at_rungs.setdefault(share, [])])[: len(points)]
            at_rungs[share] += points
            best = sorted(range(len(going)), key=order.__getitem__)[: BRACKET // 2 ** (place + 1)]
            for number, (_, training) in enumerate(going):
                if number not in best:
                    progress.stopped(training, share)
            going = [going[number] for number in sorted(best)]
        for entry, training in going:
            progress.add(entry, training)
        progress.score()
    return progress.curve()
