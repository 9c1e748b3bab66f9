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

from nas.searchers.evolution import Evolution
from nas.searchers.strategy import SearchProblem, Strategy, Trained, points_of
from nas.searchers.trellis.completion import completion, completion_weights
from nas.searchers.trellis.features import features_of
from nas.searchers.trellis.improvement import expected_improvement
from nas.searchers.trellis.surrogate import Fit, fit
from search_spaces.notation import Member
from search_spaces.optima.optima import frontier, member_of_optimum
from search_spaces.optima.stages import Floats, stages_of

BEYOND = 0.25  # of the range of prices: how far the reference is beyond the budget, where else nothing would count
NUM_DRAWS = 16  # of weights, each solved for every price: seconds a generation
NUM_RANDOM = 16  # members drawn evenly over prices, in case all solutions agree in an error
LEAST_R2 = 0.3  # of results left out one by one; below it the surrogate says next to nothing
LEAST_RESULTS = 8  # before that is asked
KNOWN_NOISE = 0.02  # nats: of a training of before, on another corpus


@final
class Trellis(Strategy):
    """See above."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem, self.feasible = problem, problem.feasible
        self.stages = stages_of(problem.feasible)
        self.features = features_of(self.stages, problem)
        known = ((one.member, one.log_perplexity) for one in problem.known)
        self.known_losses = {member: loss for member, loss in known if loss is not None}
        self.evolution = Evolution(problem)
        self.draws = self.evolution.draws
        edges = [edge for part in self.draws.slices for edge in part.latency_s_bounds]
        self.reference = (max(edges) + BEYOND * (max(edges) - min(edges)), problem.reference_loss)

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Trained]
    ) -> list[Member]:
        found = self._fit(trained)
        if not self._is_borne_out(found, trained):
            return self.evolution.propose(size, rng, seen, trained)
        members = self._candidates(found, rng, seen)
        if not members:
            return self.draws.filled([], size, rng, seen)
        pending = self._pending(seen, trained)
        everyone = [*members, *pending]
        latency_s = np.array([self.draws.place_of(member).latency_s for member in everyone])
        outlook = found.posterior.outlook(self.features.rows(everyone))
        known = np.array([self.known_losses.get(member, np.nan) for member in members] + [np.nan] * len(pending))
        mean = np.where(np.isnan(known), outlook.mean, known)  # what was trained before comes out so again
        completes = self._completion(members, trained)
        points = [point for _, point in points_of(trained)]
        for place in range(len(members), len(everyone)):
            points.append((float(latency_s[place]), float(mean[place])))
            outlook = outlook.given(place)
        chosen: list[int] = []
        while len(chosen) < min(size, len(members)):
            deviation = np.where(np.isnan(known), outlook.deviation, KNOWN_NOISE)
            improvement = expected_improvement(latency_s, mean, deviation, points, self.reference)
            worth = completes * improvement[: len(members)]
            worth[chosen] = -1.0
            best = int(np.argmax(worth))
            chosen.append(best)
            points.append((float(latency_s[best]), float(mean[best])))
            outlook = outlook.given(best)
        return self.draws.filled([members[one] for one in chosen], size, rng, seen)

    def remark(self, trained: Sequence[Trained]) -> str | None:
        if len(points_of(trained)) < LEAST_RESULTS:
            return None
        found = self._fit(trained)
        others = f"all others and {len(self.problem.known)} trainings of before" if self.problem.known else "all others"
        said = f"trellis: each result predicted from {others} with R^2 {self._r2(found):.2f}"
        if self._is_borne_out(found, trained):
            return said
        return f"{said}, too little: members were bred from the front instead"

    def _fit(self, trained: Sequence[Trained]) -> Fit:
        results = [*self.problem.known, *trained]
        members = [one.member for one in results if one.log_perplexity is not None]
        losses = np.array([one.log_perplexity for one in results if one.log_perplexity is not None])
        numbers: dict[Member, int] = {}
        of_member = [numbers.setdefault(member, len(numbers)) for member in members]
        rows = self.features.rows(members) if members else np.zeros((0, 0))
        return fit(self.features, rows, of_member, losses)

    def _pending(self, seen: Collection[Member], trained: Sequence[Trained]) -> list[Member]:
        """What is in training, in a fixed order."""
        pending = set(seen).difference(one.member for one in trained)
        return sorted((one for one in pending if self.draws.place_of(one).fits), key=repr)

    def _candidates(self, found: Fit, rng: np.random.Generator, seen: Collection[Member]) -> list[Member]:
        """Members that may be trained, each deployed form once."""
        members = [*self.problem.anchors, *(one.member for one in self.problem.known)]
        if self.problem.known and not any(map(self.feasible.fits, seen)):  # baselines are beyond the budget
            return self._drawn(self.draws.new_of(members, seen))
        depth, recipes = len(self.stages.steps), self.feasible.space.recipes
        for weights in found.posterior.draws(NUM_DRAWS, rng):
            kept = rng.integers(1, depth + 1, size=2)
            recipe = recipes[int(rng.integers(len(recipes)))]
            optima = frontier(self.stages, self.features.additive(weights, list(kept)))
            drawn = [one for one in optima if self.draws.slice_at(one.cost) is not None]
            members += [member_of_optimum(self.stages, one, entropy_regularised=recipe) for one in drawn]
        members += self.draws.filled([], NUM_RANDOM, rng, seen)
        return self._drawn(self.draws.new_of(members, seen))

    def _drawn(self, members: Sequence[Member]) -> list[Member]:
        return [member for member in members if self.draws.place_of(member).slice is not None]

    def _completion(self, members: Sequence[Member], trained: Sequence[Trained]) -> Floats:
        results = [*self.problem.known, *trained]
        if not results:
            return np.ones(len(members))
        ended = [one.member for one in results]
        completed = np.array([float(one.log_perplexity is not None) for one in results])
        return completion(self._counts(members), completion_weights(self._counts(ended), completed))

    def _counts(self, members: Sequence[Member]) -> Floats:
        """Members x (1, and per layer: live norms, attentions, nonlinear FFNs)."""
        layers = self.stages.numbered([one.architecture.layers for one in members])
        kept = self.features.is_kept[layers].mean(axis=1)
        return np.column_stack([np.ones(len(members)), self.features.live_norms[layers].mean(axis=1), kept])

    def _r2(self, found: Fit) -> float:
        """Of this search's own results."""
        return found.r2(len(self.problem.known))

    def _is_borne_out(self, found: Fit, trained: Sequence[Trained]) -> bool:
        return len(points_of(trained)) < LEAST_RESULTS or self._r2(found) >= LEAST_R2
