"""The searcher `trellis`: Thompson sampling of an additive surrogate, optimised by dynamic programming over layers.

In every generation:

1. For draws of weights from the posterior of the surrogate, and for its mean, the best architectures at every cost are
   computed. Before anything is trained, the posterior is the prior: block scores and a few global features.
2. These and some random members are evaluated at low fidelity, those first whose expected hypervolume improvement times
   probability of completion is largest. Members that are in training, or could be promoted, count as if they had ended
   with their predicted losses. The very first member gets its final training, so that there is a front early.
3. Evaluated members that are expected to add most to the front of final results are promoted, at the ratio
   `RemainingBudget.per_end`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, ndtr

from nas.run.pareto import Point
from nas.searchers.draws import Draws
from nas.searchers.strategy import Observation, RemainingBudget, SearchProblem, Strategy, Suggestion, points_of
from nas.searchers.surrogate import SEED_NOISE, Observations, Posterior, PredictiveDistribution, features_of, fit
from search_spaces.notation import Member
from search_spaces.optima import Floats, frontier, member_of_optimum, stages_of

BEYOND = 0.15  # reference point beyond the budget, as a share of the range of latencies, so that members there count
NUM_DRAWS = 16  # of weights, each solved for every cost: takes seconds a generation
NUM_SOLVED = 2  # times per draw; the second time linearised around a solution of the first
REACH = 0.4  # nats: least distance of the reference loss above the best prediction, so that several members count
NUM_RANDOM = 16  # members drawn evenly over costs, in case all draws share an error
PRIOR_LOGIT = 3.0  # 19 of 20 trainings complete
PRIOR_DEVIATION = 5.0  # standard deviation of the weights of counts, and of the logit around PRIOR_LOGIT


class Observed(NamedTuple):
    """The combined observations of one member. loss: nats. variance: of `loss` around the mean over seeds, nats^2."""

    loss: float
    variance: float


@final
class Trellis(Strategy):
    """Proposes members that are optimal for draws from a posterior, by their expected improvement of the front."""

    takes_proxies = True

    def __init__(self, problem: SearchProblem) -> None:
        self.feasible = problem.feasible
        self.stages = stages_of(problem.feasible)
        self.features = features_of(self.stages, problem)
        self.draws = Draws(problem.feasible)
        edges = [edge for part in self.draws.slices for edge in part.latency_s_bounds]
        reference_loss = max(problem.reference_loss, self._best_prediction() + REACH)
        self.reference = (max(edges) + BEYOND * (max(edges) - min(edges)), reference_loss)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation]
    ) -> list[Member]:
        remaining = RemainingBudget(proxy_evals=0, final_trainings=size)
        return [request.member for request in self.suggestions(size, rng, seen, trained, remaining)]

    def suggestions(
        self,
        size: int,
        rng: np.random.Generator,
        seen: Collection[Member],
        trained: Sequence[Observation],
        remaining: RemainingBudget,
    ) -> list[Suggestion]:
        observed = self._observed(trained)
        rows = self.features.rows(list(observed)) if observed else np.zeros((0, len(self.features.mean)))
        losses, variances = np.array(list(observed.values()), dtype=float).reshape(-1, 2).T
        posterior = fit(self.features, Observations(rows, losses, variances))
        begun = {training.member: training for training in trained}
        standing = [training.member for training in trained if training.deviation is not None and not training.promoted]
        standing = [member for member in standing if self.draws.place_of(member).fits]
        new = self._new(posterior, rng, seen)
        if not new and not standing:
            return []
        pending = [member for member in seen if member not in begun or begun[member].promoted]
        pending = sorted((member for member in pending if self.draws.place_of(member).fits), key=repr)
        members = [*new, *standing, *pending]
        batch = AcquisitionBatch(
            members=members,
            latency_s=[self.draws.place_of(member).latency_s for member in members],
            predicted=posterior.predict(self.features.rows(members)),
            observed=observed,
            completes=self._completion(members, trained),
            ended=[point for _, point in points_of([training for training in trained if training.deviation is None])],
            reference=self.reference,
        )
        return batch.suggestions(size, num_new=len(new), num_standing=len(standing), remaining=remaining)

    def _best_prediction(self) -> float:
        """Return the least loss within the budget by the prior, nats.

        Where no member is expected to reach the reference loss, only the most uncertain ones, which are the worst,
        would have an expected improvement.
        """
        intact = np.ones((len(self.stages.steps), 2))
        optima = frontier(self.stages, self.features.additive(self.features.mean, intact))
        members = [member_of_optimum(self.stages, optimum) for optimum in optima]
        return float((self.features.rows(members) @ self.features.mean).min())

    def _observed(self, trained: Sequence[Observation]) -> dict[Member, Observed]:
        observed: dict[Member, Observed] = {}
        for training in trained:
            if training.log_perplexity is not None:
                noise = training.deviation or SEED_NOISE
                loss, variance = observed.pop(training.member, Observed(0.0, math.inf))
                precision = 1 / variance + 1 / noise**2
                mean = (loss / variance + training.log_perplexity / noise**2) / precision
                observed[training.member] = Observed(mean, 1 / precision)
        return observed

    def _new(self, posterior: Posterior, rng: np.random.Generator, seen: Collection[Member]) -> list[Member]:
        """Return new members that may be trained, one per folded form."""
        members: list[Member] = []
        depth, recipes = len(self.stages.steps), self.feasible.space.recipes
        for weights in (posterior.mean, *posterior.draws(NUM_DRAWS, rng)):
            around = (rng.random((depth, 2)) < rng.random(2)).astype(float)
            recipe = recipes[int(rng.integers(len(recipes)))]
            for _ in range(NUM_SOLVED):
                optima = frontier(self.stages, self.features.additive(weights, around))
                members += [
                    member_of_optimum(self.stages, optimum, entropy_regularised=recipe)
                    for optimum in optima
                    if self.draws.slice_of(optimum) is not None
                ]
                chosen = optima[int(rng.integers(len(optima)))]
                around = self.features.kept[self.stages.numbered([chosen.layers])[0]]
        members += self.draws.filled([], NUM_RANDOM, rng, seen)
        return self.draws.new_of(members, seen)

    def _completion(self, members: Sequence[Member], trained: Sequence[Observation]) -> Floats:
        if not trained:
            return np.ones(len(members))
        completed = np.array([float(training.log_perplexity is not None) for training in trained])
        weights = completion_weights(self._counts([training.member for training in trained]), completed)
        return completion(self._counts(members), weights)

    def _counts(self, members: Sequence[Member]) -> Floats:
        """Return members x (1, live norms per layer, and shares of layers with attention and with a nonlinear FFN)."""
        layers = self.stages.numbered([member.architecture.layers for member in members])
        kept = (self.features.kept[layers] > 0).mean(axis=1)
        return np.column_stack([np.ones(len(members)), self.features.live_norms[layers].mean(axis=1), kept])


class AcquisitionBatch:
    """Chooses a generation's trainings one by one, by their expected improvement of the front.

    members: new members, then evaluated ones that could be promoted, then those in training. latency_s, predicted,
        completes: seconds per token, predicted loss and probability of completion of each member. observed: the
        observations of members that have any. ended: points of final results. reference: point of the hypervolume.
    """

    def __init__(
        self,
        *,
        members: Sequence[Member],
        latency_s: Sequence[float],
        predicted: PredictiveDistribution,
        observed: Mapping[Member, Observed],
        completes: Floats,
        ended: Sequence[Point],
        reference: Point,
    ) -> None:
        self.members, self.latency_s, self.completes = members, np.array(latency_s), completes
        self.predicted = predicted
        pairs = [observed.get(member, Observed(0.0, math.inf)) for member in members]
        self.losses, self.variances = np.array(pairs, dtype=float).T
        self.mean, _ = self.predicted.with_own(self.losses, self.variances)
        self.points, self.reference = list(ended), reference

    def suggestions(
        self, size: int, *, num_new: int, num_standing: int, remaining: RemainingBudget
    ) -> list[Suggestion]:
        """Return at most `size` trainings. num_new, num_standing: how many of `members` are new, or may be promoted."""
        new, standing = list(range(num_new)), list(range(num_new, num_new + num_standing))
        for place in range(num_new + num_standing, len(self.members)):
            self._take(place)
        suggestions: list[Suggestion] = []
        while len(suggestions) < size and remaining.final_trainings > 0 and (new or standing):
            keeps_pace = bool(standing) and remaining.proxy_evals <= remaining.per_end * (remaining.final_trainings - 1)
            is_end = keeps_pace or not self.points or not new or remaining.proxy_evals <= 0
            bidders = (standing or new) if is_end else new
            virtual = [] if is_end else [(float(self.latency_s[at]), float(self.mean[at])) for at in standing]
            points, (_, deviation) = [*self.points, *virtual], self.predicted.with_own(self.losses, self.variances)
            improvement = expected_improvement(self.latency_s, self.mean, deviation, points, self.reference)
            best = max(bidders, key=(self.completes * improvement).__getitem__)
            suggestions.append(Suggestion(self.members[best], not is_end, float(self.mean[best])))
            self._take(best)
            bidders.remove(best)
            remaining = remaining.after(is_proxy=not is_end)
        return suggestions

    def _take(self, place: int) -> None:
        """Condition the surrogate on a pending member's predicted loss ("kriging believer")."""
        self.points.append((float(self.latency_s[place]), float(self.mean[place])))
        self.predicted = self.predicted.condition_on(place)


def expected_improvement(
    latency_s: Floats, mean: Floats, deviation: Floats, points: Sequence[Point], reference: Point
) -> Floats:
    """Return the expected hypervolume that each candidate adds to the front of `points`, in seconds x nats.

    latency_s, mean, deviation: each candidate's latency, and mean and standard deviation of its loss, nats.

    A point with loss y at latency t adds the area between y and the staircase of the front, from t to the reference.
    The expected area, in closed form, is a sum over the steps of the staircase beyond t: the width of the step times
    the expected improvement on the height of the step.

    Source: Emmerich, Giannakoglou and Naujoks 2006, https://doi.org/10.1109/TEVC.2005.859463, for expected hypervolume
    improvement; Jones, Schonlau and Welch 1998, https://doi.org/10.1023/A:1008306431147, for the term of a step.
    """
    inside = sorted(point for point in points if point[0] < reference[0] and point[1] < reference[1])
    steps = np.array([(0.0, reference[1]), *inside])
    lowest = np.minimum.accumulate(steps[:, 1])
    steps = steps[np.append(True, lowest[1:] < lowest[:-1])]  # keeps only the front
    edges, heights = np.append(steps[:, 0], reference[0]), steps[:, 1]
    begins, ends = edges[:-1], edges[1:]
    widths = (ends - np.maximum(begins, latency_s[:, None])).clip(min=0)  # candidates x steps
    gaps = heights - mean[:, None]
    scaled = gaps / deviation[:, None]
    density = np.exp(-(scaled**2) / 2) / np.sqrt(2 * np.pi)
    expected: Floats = (widths * (gaps * ndtr(scaled) + deviation[:, None] * density)).sum(axis=1)
    return expected


def completion_weights(counts: Floats, completed: Floats) -> Floats:
    """Return the most probable weights of a logistic regression of completion, with a normal prior around PRIOR_LOGIT.

    counts: results x counts, the first of which is 1. completed: 1 or 0 per result.
    """
    centre = np.zeros(counts.shape[1])
    centre[0] = PRIOR_LOGIT
    signs = 2 * completed - 1

    def loss(weights: Floats) -> tuple[float, Floats]:
        apart, logits = weights - centre, signs * (counts @ weights)
        slope = apart / PRIOR_DEVIATION**2 - counts.T @ (signs * expit(-logits))
        return float(np.logaddexp(0, -logits).sum() + apart @ apart / 2 / PRIOR_DEVIATION**2), slope

    weights: Floats = minimize(loss, centre, jac=True).x
    return weights


def completion(counts: Floats, weights: Floats) -> Floats:
    """Return the probability of completion for each row of `counts`. weights: result of `completion_weights`."""
    likely: Floats = expit(counts @ weights)
    return likely
