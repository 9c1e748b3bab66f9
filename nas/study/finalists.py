"""Which members of the front are trained with one more seed next: a function of results alone.

Perplexity is noisy over seeds, and a front picks what was lucky. A further seed is worth what the front is expected to
gain by it: as its mean moves, a member is found better than it seemed, or another one takes its place. That is most
where members are close to their neighbours and have few seeds, and less than what any new candidate is worth as long as
neighbours differ by more than seeds do; so seeds come last, and no more of them than half as many as candidates were
trained to their end.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from nas.run.pareto import Point, nondominated, point_of_seeds
from nas.searchers.strategy import Key, Observation

TINY = 1e-12  # nats: a deviation of next to nothing


def next_round(
    results: Sequence[Observation], asked: Collection[Key], *, seeds: int, most: int, size: int, reference: Point
) -> list[Key]:
    """The replicates to train next, at most `size`, those that are worth most first; empty if none is wanted.

    results: of candidates and replicates that have ended. asked: the replicates there were. seeds: that a member may
    have more than its first. most: replicates in all. reference: of the hypervolume.
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
    """Hypervolume that the front is expected to gain by one more seed of a member, seconds x nats.

    The mean over n seeds moves by a normal variable of variance s^2 / n - s^2 / (n + 1).
    Source: Frazier, Powell and Dayanik 2009, https://doi.org/10.1287/ijoc.1080.0314, for the value of an observation.
    """
    from nas.searchers.surrogate import SEED_NOISE  # scipy, which a study waits for later
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
    """The candidates on the front of the means over seeds, cheapest first, as `nas.run.front.front` has it."""
    points = _means(results)
    ordered = sorted(points, key=lambda index: (points[index], index))
    kept = nondominated([points[index] for index in ordered])
    return [index for index, keep in zip(ordered, kept, strict=True) if keep]


def _means(results: Iterable[Observation]) -> dict[int, Point]:
    """The points of the candidates that may be on the front, by index."""
    by_index: dict[int, list[Observation]] = {}
    for result in results:
        by_index.setdefault(result.index, []).append(result)
    return {
        index: point_of_seeds(
            [(trial.latency_s, trial.log_perplexity) for trial in trials if trial.log_perplexity is not None]
        )
        for index, trials in by_index.items()
        if _may_be_on_the_front(trials)
    }


def _may_be_on_the_front(trials: Sequence[Observation]) -> bool:
    statuses = {trial.status for trial in trials}
    feasible = all(trial.feasible for trial in trials if trial.status == "completed")
    return "completed" in statuses and "diverged" not in statuses and feasible
