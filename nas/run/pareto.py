"""Pareto fronts of perplexity against latency; both are minimised.

A point is (latency in seconds, natural logarithm of the perplexity). Equal points are all kept, since each of their
architectures is a valid answer.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TypeVar

import moocore
import numpy as np

from costmodel.errors import UserError

Point = tuple[float, float]
T = TypeVar("T")


def nondominated(points: Sequence[Point]) -> list[bool]:
    """Whether each point is nondominated: no other is as good in both coordinates and better in one.

    Raises UserError for a non-finite coordinate: a diverged trial has no point.
    """
    if not points:
        return []
    return [bool(kept) for kept in moocore.is_nondominated(_finite(points), keep_weakly=True)]


def pareto_front(some: Iterable[T], point_of: Callable[[T], Point]) -> list[T]:
    """Return the items whose points are nondominated, cheapest first; items with equal points keep their order."""
    ordered = sorted(some, key=point_of)
    kept = nondominated([point_of(one) for one in ordered])
    return [one for one, keep in zip(ordered, kept, strict=True) if keep]


def ranks(points: Sequence[Point]) -> list[int]:
    """Return the Pareto rank of each point, all finite: 0 on the front, 1 on the front of the rest, and so on."""
    if not points:
        return []
    return [int(rank) for rank in moocore.pareto_rank(_finite(points))]


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """Return the area dominated by the points and bounded by the reference point, in seconds x nats.

    Points beyond the reference in either coordinate add nothing. Raises UserError for a non-finite coordinate.
    """
    if not points:
        return 0.0
    return float(moocore.hypervolume(_finite(points), ref=np.asarray(reference, dtype=float)))


def knee(points: Sequence[Point]) -> int:
    """Return the index of the knee: the point of the front that is farthest below the line between the front's ends.

    Both axes are scaled to the extent of the front. If the front has fewer than three points, or all are equal, the
    knee is the point of lowest perplexity. Raises UserError if there are no points, or for a non-finite coordinate.

    Source: Das 1999, "On characterizing the knee of the Pareto curve", for the distance to the chord.
    """
    if not points:
        raise UserError("a knee needs at least one point, but got none.")
    array = _finite(points)
    front = np.flatnonzero(nondominated(points))
    best = int(front[np.argmin(array[front, 1])])
    extent = np.ptp(array[front], axis=0)
    if len(front) < 3 or not extent.all():
        return best
    unit = (array[front] - array[front].min(axis=0)) / extent
    return int(front[np.argmin(unit.sum(axis=1))])


def point_of_seeds(points: Sequence[Point]) -> Point:
    """Return the point of a candidate: the highest latency and the mean of the losses of its seeds, at least one.

    Latencies differ if the weights of some seeds fold less far, and the cost must hold for every seed.
    """
    return max(latency_s for latency_s, _ in points), fmean(loss for _, loss in points)


def dominates(point: Point, other: Point) -> bool:
    """Whether `point` is at least as good in both coordinates and better in one."""
    return point[0] <= other[0] and point[1] <= other[1] and point != other


def _finite(points: Sequence[Point]) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    array = np.asarray(points, dtype=float)
    if not np.isfinite(array).all():
        raise UserError(f"points must be finite, but got {array[~np.isfinite(array).all(axis=1)][0].tolist()}.")
    return array
