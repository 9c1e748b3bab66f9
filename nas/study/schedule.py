"""The schedule of trials, with an ask-and-tell interface: candidates in generations, then more seeds for the front.

A candidate begins with a low-fidelity evaluation, which stops at the first rung, or with its final training. If the
candidate is promoted, it is suggested again, and its training continues from the checkpoint.

Proposals are reproducible without a time budget: generation g depends only on the configuration, on g and on the
results of generations up to g - 2, in any order of arrival. The lag keeps workers busy while a generation finishes.
Rounds of replicates (further seeds) are two generations apart, so that a round depends on all earlier results.

Perplexity varies with the seed, and a front favours lucky seeds. The expected gain from one more seed is largest for
members that have close neighbours and few seeds, and smaller than that of a new candidate as long as neighbours differ
by more than seeds do. Seeds therefore come last, at most half as many as candidates, rounded up.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nas.run.pareto import Point, pareto_front, point_of_seeds
from nas.searchers.strategy import Key, Observation, RemainingBudget, Strategy, Suggestion
from search_spaces.notation import Member

GENERATION_SIZE = 2  # two workers finish a generation in one round; larger generations see results later
LAG = 2  # generation g sees the results of generations up to g - LAG
TINY = 1e-12  # nats: a standard deviation close to zero

# The prior of the line from low-fidelity to final losses, in nats above the parent's: mean and standard deviation of
# intercept and slope, and the standard deviation of final losses around the line. It comes from 150 placements trained
# from the builtin parent (`experiments/data/table-12.csv`), where a line of slope 0.74 leaves a residual of 0.044 nats
# after a quarter of the tokens, and of 0.018 where losses are within 0.7 nats of the parent's.
LINE = (-0.1, 0.74)
FROM_PARENT, FROM_SCRATCH = (0.2, 0.15), (0.4, 0.3)  # wider from scratch, where reachable losses are unknown
AROUND_LINE = 0.025


class Trainings(NamedTuple):
    """Numbers of candidates that get a final training (`ends`) and a low-fidelity evaluation (`shorts`)."""

    ends: int
    shorts: int


class TrialSchedule:
    """Returns the trainings of a run in order, which a searcher suggests in generations, and receives their results.

    Args:
        strategy: the searcher. seed: the run's seed.
        num_trials: number of candidates that get the final training.
        num_proxy_evals: number of candidates that get a low-fidelity evaluation, if the searcher uses these.
        baselines: members to train for comparison; ignored if there are `known` proposals.
        finalist_seeds, most_replicates: largest number of further seeds of a member of the front, and of all members.
        generation_size: number of candidates in a generation.
        reference: reference point of the hypervolume, in seconds per token and nats.
        parent_loss: the parent's validation loss, nats; None from scratch.
        known: proposals of earlier sessions, from the ledger. They are repeated even if the searcher, in this version,
            would propose others.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        seed: int,
        num_trials: int,
        num_proxy_evals: int = 0,
        baselines: Sequence[Member] = (),
        finalist_seeds: int = 0,
        most_replicates: int = 0,
        reference: Point,
        parent_loss: float | None = None,
        known: Sequence[Suggestion] = (),
        generation_size: int = GENERATION_SIZE,
    ) -> None:
        self.strategy, self.seed = strategy, seed
        self.most = Trainings(num_trials, num_proxy_evals if strategy.takes_proxies else 0)
        self.remaining = _remaining(Trainings(0, 0), self.most)
        self.finalist_seeds, self.most_replicates = finalist_seeds, most_replicates
        self.reference, self.parent_loss = reference, parent_loss
        self.generation_size = generation_size
        self.proposals: list[Suggestion] = []
        self.proxy_evals: dict[int, Observation] = {}
        self.results: dict[Key, Observation] = {}  # of final trainings, and of any that diverged or failed
        self._untold: dict[Key, int] = {}  # generations of trainings that have not ended
        self._skipped: list[Suggestion] = []
        self._asked, self._generation, self._exhausted = 0, 0, False
        self._replicated = 0 in (finalist_seeds, most_replicates)
        self._known: dict[int, list[Suggestion]] = {}
        self._indexes: dict[Member, int] = {}
        for proposal in known:
            if proposal.role == "baseline":
                self._add(proposal)
            else:
                self._known.setdefault(proposal.generation, []).append(proposal)
        if not known:
            for member in baselines:
                if member not in self._indexes:
                    self._add(Suggestion(member, generation=0, role="baseline", index=len(self._indexes)))

    def ask(self) -> Suggestion | None:
        """Return the next suggestion, or None if results are missing or nothing is left (`finished`, `is_held`)."""
        if self._asked == len(self.proposals) and not self._extend():
            return None
        proposal = self.proposals[self._asked]
        self._asked += 1
        return proposal

    def skip(self, proposal: Suggestion) -> None:
        """Take back the suggestion that `ask` returned last, because it is not trained in this session."""
        self._untold.pop(proposal.key, None)
        self._skipped.append(proposal)

    def plan(self, more: Trainings) -> None:
        """Limit further trainings of candidates in this session to `more`, instead of all that are left."""
        self.remaining = _remaining(self.asked, more)

    @property
    def asked(self) -> Trainings:
        """Numbers of proposed trainings of candidates, including those in `waiting` but not the skipped ones."""
        kinds = Counter(proposal.is_proxy for proposal in self.proposals if proposal.role == "candidate")
        kinds.subtract(proposal.is_proxy for proposal in self._skipped if proposal.role == "candidate")
        return Trainings(ends=kinds[False], shorts=kinds[True])

    @property
    def waiting(self) -> list[Suggestion]:
        """The proposals that `ask` has not returned yet."""
        return self.proposals[self._asked :]

    @property
    def num_evaluated(self) -> int:
        """Number of candidates whose low-fidelity evaluation was proposed and not skipped, and that can be promoted."""
        ends = {proposal.index for proposal in self.proposals if not proposal.is_proxy}
        ended = {index for index, _ in self.results}  # evaluations that diverged or failed
        skipped = {proposal.index for proposal in self._skipped}
        return len({proposal.index for proposal in self.proposals} - ends - ended - skipped)

    def tell(self, result: Observation) -> None:
        """Receive the result of a training that `ask` returned."""
        if result.status == "paused":
            self.proxy_evals[result.index] = result
        else:
            self.results[result.key] = result
        self._untold.pop(result.key, None)

    @property
    def finished(self) -> bool:
        """Whether `ask` has returned every training of the run, further seeds included."""
        return self._asked == len(self.proposals) and self._all_proposed and self._replicated

    @property
    def _all_proposed(self) -> bool:
        return self._exhausted or self.asked.ends >= self.most.ends

    @property
    def is_held(self) -> bool:
        """Whether no more trainings are planned in this session, although some are left."""
        is_known = self._generation in self._known
        return self.remaining.final_trainings <= 0 and not (self._all_proposed or is_known or self.waiting)

    def _extend(self) -> bool:
        """Propose the next generation if the results it depends on are known; return whether it was proposed."""
        if not self._all_proposed:
            if self.is_held or not self._visible(self._generation):
                return False
            suggestions, size = self._known.get(self._generation, []), self.generation_size
            if len(suggestions) < size:  # the ledger has only the beginning of the generation, or nothing
                rng = np.random.default_rng([self.seed, self._generation])
                trained, members = self.trained(self._generation - LAG), {begun.member for begun in suggestions}
                asked = self.strategy.suggestions(size, rng, self._indexes.keys(), trained, self.remaining)
                suggestions = [*suggestions, *(new for new in asked if new.member not in members)][:size]
            for suggestion in suggestions:
                index = self._indexes.get(suggestion.member, len(self._indexes))
                self._add(replace(suggestion, index=index, generation=self._generation))
            self._exhausted = len(suggestions) < size and self.remaining.final_trainings > 0
            self._generation += 1
            return bool(suggestions) or self._extend()
        generation = max((proposal.generation for proposal in self.proposals), default=0) + LAG
        if self._replicated or not self._visible(generation):
            return False
        candidates = {proposal.index: proposal for proposal in self.proposals if proposal.role == "candidate"}
        keys = next_round(
            [result for key, result in sorted(self.results.items()) if key[0] in candidates],
            [proposal.key for proposal in self.proposals if proposal.role == "replicate"],
            seeds=self.finalist_seeds,
            most=self.most_replicates,
            size=self.generation_size,
            reference=self.reference,
        )
        for index, replicate in keys:
            again = replace(candidates[index], generation=generation, role="replicate", replicate=replicate)
            self._add(replace(again, is_proxy=False, expected=None))
        self._replicated = not keys
        return bool(keys)

    def _visible(self, generation: int) -> bool:
        return min(self._untold.values(), default=generation) > generation - LAG

    def trained(self, generation: int | None = None) -> list[Observation]:
        """Return an observation of each candidate that has a result, in order of proposal, without those that failed.

        After a low-fidelity evaluation alone, the loss is the predicted final loss (`losses_after_proxies`).
        generation: last generation whose results are included; None for all.
        """
        asked: dict[int, list[Suggestion]] = {}
        for proposal in self.proposals:
            if proposal.role == "candidate":
                asked.setdefault(proposal.index, []).append(proposal)
        states: list[Observation] = []
        for index, proposals in asked.items():
            seen = [stage for stage in proposals if generation is None or stage.generation <= generation]
            ended = self.results.get((index, 0)) if len(seen) == len(proposals) else None
            state = ended or (self.proxy_evals.get(index) if any(stage.is_proxy for stage in seen) else None)
            if state is not None:
                states.append(replace(state, promoted=ended is None and len(proposals) > 1))
        ends = losses_after_proxies(states, self.parent_loss)
        return [
            replace(state, log_perplexity=end.mean, deviation=end.deviation) if end else state
            for state, end in zip(states, ends, strict=True)
            if state.status != "failed"
        ]

    def _add(self, proposal: Suggestion) -> None:
        self.proposals.append(proposal)
        self._untold[proposal.key] = proposal.generation
        self._indexes.setdefault(proposal.member, proposal.index)
        if proposal.role == "candidate":
            self.remaining = self.remaining.after(is_proxy=proposal.is_proxy)


def _remaining(asked: Trainings, more: Trainings) -> RemainingBudget:
    per_end = (asked.shorts + more.shorts) / max(1, asked.ends + more.ends - 1)
    return RemainingBudget(proxy_evals=more.shorts, final_trainings=more.ends, per_end=per_end)


class End(NamedTuple):
    """Predicted final log-perplexity, nats, and its standard deviation."""

    mean: float
    deviation: float


def losses_after_proxies(results: Sequence[Observation], parent_loss: float | None) -> list[End | None]:
    """Return a predicted final loss for each low-fidelity (`paused`) result, and None for each other result.

    The prediction is a Bayesian linear regression on the loss at the first rung, with both losses relative to the
    parent's. parent_loss: nats; None from scratch, where the lowest first-rung loss of the paused results replaces it.

    Source: Swersky, Snoek and Adams 2014, arXiv 1406.3896, for resuming paused trainings by their predicted result;
    Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 2.1, for the regression.
    """
    at_proxies = [result.rung_losses[0] for result in results if result.status == "paused"]
    if not at_proxies:
        return [None] * len(results)
    base, deviation = (min(at_proxies), FROM_SCRATCH) if parent_loss is None else (parent_loss, FROM_PARENT)
    ended = [
        (result.rung_losses[0], result.log_perplexity)
        for result in results
        if result.log_perplexity is not None and result.rung_losses
    ]
    at_rung, at_end = np.array(ended, dtype=float).reshape(-1, 2).T - base
    terms, known = (np.column_stack([np.ones(len(x)), x]) for x in (np.array(at_proxies) - base, at_rung))
    prior = np.array(deviation) ** -2
    covariance = np.linalg.inv(np.diag(prior) + (known.T / AROUND_LINE**2) @ known)
    weights = covariance @ (np.array(LINE) * prior + (known.T / AROUND_LINE**2) @ at_end)
    ends = (End(base + float(row @ weights), math.sqrt(row @ covariance @ row + AROUND_LINE**2)) for row in terms)
    return [next(ends) if result.status == "paused" else None for result in results]


def next_round(
    results: Sequence[Observation], asked: Collection[Key], *, seeds: int, most: int, size: int, reference: Point
) -> list[Key]:
    """Return the keys (index, replicate) of at most `size` replicates to train next, most valuable first.

    The list is empty if no more replicates are wanted. results: of candidates and replicates that have ended. asked:
        keys of replicates proposed earlier. seeds, most: largest number of replicates of a member, and of all members.
        reference: reference point of the hypervolume, in seconds per token and nats.
    """
    points = _means(results)
    tried = Counter(index for index, _ in asked)
    worths = {
        index: _worth_of_a_seed(index, points, 1 + tried[index], reference)
        for index in finalists(results)
        if tried[index] < seeds
    }
    best = sorted(worths, key=lambda index: (-worths[index], index))[: min(size, most - len(asked))]
    return [(index, 1 + tried[index]) for index in best]


def _worth_of_a_seed(index: int, points: Mapping[int, Point], num_seeds: int, reference: Point) -> float:
    """Expected hypervolume that one more seed of a member adds to the front, seconds x nats.

    One more seed changes the mean over n seeds by a normal variable of variance s^2 / n - s^2 / (n + 1).
    Source: Frazier, Powell and Dayanik 2009, https://doi.org/10.1287/ijoc.1080.0314, for the value of an observation.
    """
    from nas.searchers.surrogate import SEED_NOISE  # imported late, because scipy takes long
    from nas.searchers.trellis import expected_improvement

    latency_s, loss = points[index]
    others = [point for other, point in points.items() if other != index]
    moves = SEED_NOISE * math.sqrt(1 / num_seeds - 1 / (num_seeds + 1))
    known, expected = (
        expected_improvement(np.array([latency_s]), np.array([loss]), np.array([deviation]), others, reference)[0]
        for deviation in (TINY, moves)
    )
    return float(expected - known)


def finalists(results: Iterable[Observation]) -> list[int]:
    """Return the indexes of the candidates on the Pareto front, cheapest first, with losses as means over seeds."""
    points = _means(results)
    return [index for index, _ in pareto_front(sorted(points.items()), lambda item: item[1])]


def _means(results: Iterable[Observation]) -> dict[int, Point]:
    by_index: dict[int, list[Observation]] = {}
    for result in results:
        by_index.setdefault(result.index, []).append(result)
    points: dict[int, Point] = {}
    for index, trials in by_index.items():
        completed = [trial for trial in trials if trial.status == "completed"]
        diverged = any(trial.status == "diverged" for trial in trials)
        if completed and not diverged and all(trial.feasible for trial in completed):
            losses = [(trial.latency_s, trial.log_perplexity) for trial in trials if trial.log_perplexity is not None]
            points[index] = point_of_seeds(losses)
    return points
