"""The searcher `trellis`: what adds up is drawn from a posterior and solved exactly, for every price at once.

Per generation: weights are drawn from the posterior of the surrogate, given what has been trained in this search and,
from the builtin parent, before it; the graph is solved for the whole frontier of price against each draw's scores; of
all these members, some random ones, the anchors and what was trained before, those are taken one by one that are
expected to add most to the front, times the probability that they complete, each as if those before it, and those in
training, had come out as expected. A search that knows trainings of before begins with the best of them, since the
optimum of what is fitted promises more than it keeps. Where results do not bear the surrogate out, members are drawn
and bred instead.
"""

from collections.abc import Collection, Sequence
from typing import final

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, ndtr

from nas.run.pareto import Point
from nas.searchers.evolution import Evolution
from nas.searchers.strategy import SearchProblem, Strategy, Trained, points_of
from nas.searchers.surrogate import Fit, features_of, fit
from search_spaces.notation import Member
from search_spaces.optima.optima import frontier, member_of_optimum
from search_spaces.optima.stages import Floats, stages_of

BEYOND = 0.25  # of the range of prices: how far the reference is beyond the budget, where else nothing would count
NUM_DRAWS = 16  # of weights, each solved for every price: seconds a generation
NUM_RANDOM = 16  # members drawn evenly over prices, in case all solutions agree in an error
LEAST_R2 = 0.3  # of results left out one by one; below it the surrogate says next to nothing
LEAST_RESULTS = 8  # before that is asked
KNOWN_NOISE = 0.02  # nats: of a training of before, on another corpus
PRIOR_LOGIT = 3.0  # 19 of 20 complete
PRIOR_DEVIATION = 5.0  # of the weights of counts per layer, and of the logit


@final
class Trellis(Strategy):
    """Expected improvement of the front, over members that are optimal for draws from a posterior."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem, self.feasible = problem, problem.feasible
        self.stages = stages_of(problem.feasible)
        self.features = features_of(self.stages, problem)
        self.known_losses = {member: loss for member, (_, loss) in points_of(problem.known)}
        self.evolution = Evolution(problem)
        self.draws = self.evolution.draws
        edges = [edge for part in self.draws.slices for edge in part.latency_s_bounds]
        self.reference = (max(edges) + BEYOND * (max(edges) - min(edges)), problem.reference_loss)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Trained]
    ) -> list[Member]:
        fitted = self._fit(trained)
        if not self._is_borne_out(fitted, trained):
            return self.evolution.propose(size, rng, seen, trained)
        members = self._candidates(fitted, rng, seen)
        if not members:
            return self.draws.filled([], size, rng, seen)
        pending = self._pending(seen, trained)
        everyone = [*members, *pending]
        latency_s = np.array([self.draws.place_of(member).latency_s for member in everyone])
        predicted = fitted.posterior.predict(self.features.rows(everyone))
        known = np.array([self.known_losses.get(member, np.nan) for member in members] + [np.nan] * len(pending))
        mean = np.where(np.isnan(known), predicted.mean, known)  # what was trained before comes out so again
        completes = self._completion(members, trained)
        points = [point for _, point in points_of(trained)]
        for place in range(len(members), len(everyone)):
            points.append((float(latency_s[place]), float(mean[place])))
            predicted = predicted.condition_on(place)
        chosen: list[int] = []
        while len(chosen) < min(size, len(members)):
            deviation = np.where(np.isnan(known), predicted.deviation, KNOWN_NOISE)
            improvement = expected_improvement(latency_s, mean, deviation, points, self.reference)
            worth = completes * improvement[: len(members)]
            worth[chosen] = -1.0
            best = int(np.argmax(worth))
            chosen.append(best)
            points.append((float(latency_s[best]), float(mean[best])))
            predicted = predicted.condition_on(best)
        return self.draws.filled([members[number] for number in chosen], size, rng, seen)

    def remark(self, trained: Sequence[Trained]) -> str | None:
        if len(points_of(trained)) < LEAST_RESULTS:
            return None
        fitted = self._fit(trained)
        others = f"all others and {len(self.problem.known)} trainings of before" if self.problem.known else "all others"
        quality = f"trellis: each result predicted from {others} with R^2 {self._r2(fitted):.2f}"
        if self._is_borne_out(fitted, trained):
            return quality
        return f"{quality}, too little: members were bred from the front instead"

    def _fit(self, trained: Sequence[Trained]) -> Fit:
        completed = points_of([*self.problem.known, *trained])
        members, losses = [member for member, _ in completed], np.array([loss for _, (_, loss) in completed])
        numbers: dict[Member, int] = {}
        of_member = [numbers.setdefault(member, len(numbers)) for member in members]
        rows = self.features.rows(members) if members else np.zeros((0, 0))
        return fit(self.features, rows, of_member, losses)

    def _pending(self, seen: Collection[Member], trained: Sequence[Trained]) -> list[Member]:
        """Members that are in training, in a fixed order."""
        pending = set(seen).difference(training.member for training in trained)
        return sorted((member for member in pending if self.draws.place_of(member).fits), key=repr)

    def _candidates(self, fitted: Fit, rng: np.random.Generator, seen: Collection[Member]) -> list[Member]:
        """Members that may be trained, each deployed form once."""
        members = [*self.problem.anchors, *(training.member for training in self.problem.known)]
        if self.problem.known and not any(map(self.feasible.fits, seen)):  # baselines are beyond the budget
            return self._drawn(self.draws.new_of(members, seen))
        depth, recipes = len(self.stages.steps), self.feasible.space.recipes
        for weights in fitted.posterior.draws(NUM_DRAWS, rng):
            kept = rng.integers(1, depth + 1, size=2)
            recipe = recipes[int(rng.integers(len(recipes)))]
            optima = frontier(self.stages, self.features.additive(weights, list(kept)))
            members += [
                member_of_optimum(self.stages, optimum, entropy_regularised=recipe)
                for optimum in optima
                if self.draws.slice_at(optimum.cost) is not None
            ]
        members += self.draws.filled([], NUM_RANDOM, rng, seen)
        return self._drawn(self.draws.new_of(members, seen))

    def _drawn(self, members: Sequence[Member]) -> list[Member]:
        return [member for member in members if self.draws.place_of(member).slice is not None]

    def _completion(self, members: Sequence[Member], trained: Sequence[Trained]) -> Floats:
        results = [*self.problem.known, *trained]
        if not results:
            return np.ones(len(members))
        completed = np.array([float(training.log_perplexity is not None) for training in results])
        weights = completion_weights(self._counts([training.member for training in results]), completed)
        return completion(self._counts(members), weights)

    def _counts(self, members: Sequence[Member]) -> Floats:
        """Members x (1, and per layer: live norms, attentions, nonlinear FFNs)."""
        layers = self.stages.numbered([member.architecture.layers for member in members])
        kept = self.features.is_kept[layers].mean(axis=1)
        return np.column_stack([np.ones(len(members)), self.features.live_norms[layers].mean(axis=1), kept])

    def _r2(self, fitted: Fit) -> float:
        """How much of the results of this search alone is predicted."""
        return fitted.r2(len(self.problem.known))

    def _is_borne_out(self, fitted: Fit, trained: Sequence[Trained]) -> bool:
        return len(points_of(trained)) < LEAST_RESULTS or self._r2(fitted) >= LEAST_R2


def expected_improvement(
    latency_s: Floats, mean: Floats, deviation: Floats, points: Sequence[Point], reference: Point
) -> Floats:
    """Expected hypervolume that each candidate adds to the front of the points, seconds x nats, in closed form.

    A point of loss y at price t adds the area between y and the staircase of the front, from t to the reference. So
    its expectation is a sum, over the steps of the staircase beyond t, of their width times the expected improvement
    on their height.

    Source: Emmerich, Giannakoglou and Naujoks 2006, https://doi.org/10.1109/TEVC.2005.859463, for expected hypervolume
    improvement; Jones, Schonlau and Welch 1998, https://doi.org/10.1023/A:1008306431147, for the term of a step.
    """
    inside = sorted(point for point in points if point[0] < reference[0] and point[1] < reference[1])
    steps = np.array([(0.0, reference[1]), *inside])
    lowest = np.minimum.accumulate(steps[:, 1])
    steps = steps[np.append(True, lowest[1:] < lowest[:-1])]  # of many points few are on the front
    edges, heights = np.append(steps[:, 0], reference[0]), steps[:, 1]
    begins, ends = edges[:-1], edges[1:]
    widths = (ends - np.maximum(begins, latency_s[:, None])).clip(min=0)  # candidates x steps
    gaps = heights - mean[:, None]
    scaled = gaps / deviation[:, None]
    density = np.exp(-(scaled**2) / 2) / np.sqrt(2 * np.pi)
    expected: Floats = (widths * (gaps * ndtr(scaled) + deviation[:, None] * density)).sum(axis=1)
    return expected


def completion_weights(counts: Floats, completed: Floats) -> Floats:
    """The most probable weights of a logistic regression, towards what usually happens.

    counts: results x counts, the first of them 1. completed: 1 or 0.
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
    """The probability that each completes."""
    likely: Floats = expit(counts @ weights)
    return likely
