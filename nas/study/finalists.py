"""Chooses the members of the front that are trained with one more seed, from results alone.

Perplexity varies with the seed, and a front favours lucky seeds. The expected gain from one more seed is largest for
members that have close neighbours and few seeds, and smaller than that of a new candidate as long as neighbours differ
by more than seeds do. Seeds therefore come last, at most half as many as candidates.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from nas.run.pareto import Point, pareto_front, point_of_seeds
from nas.searchers.strategy import Key, Observation

TINY = 1e-12  # nats: a standard deviation close to zero


def next_round(
    results: Sequence[Observation], asked: Collection[Key], *, seeds: int, most: int, size: int, reference: Point
) -> list[Key]:
    """Return the replicates to train next, at most `size`, the most valuable first; none if no more are wanted.

    results: of candidates and replicates that have ended. asked: earlier replicates. seeds: most replicates of a
        member.
        most: most replicates in all. reference: reference point of the hypervolume.
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
    """Return the candidates on the front of means over seeds, cheapest first, as in `nas.run.front.front`."""
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
