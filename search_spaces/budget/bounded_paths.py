"""The paths of a layered graph whose cost stays within limits: counted exactly, drawn uniformly, never rejected.

Paths are cut at the middle layer. Tables hold how many ways lead from the source to each boundary up to the cut,
and from each boundary from the cut on to the sink, at which cost; a path is within the limit if its halves are
together. That keeps tables at a few thousand rows where whole paths have tens of thousands of distinct costs.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import networkx as nx
import numpy as np

from search_spaces.architecture import Layer
from search_spaces.budget.cost_counts import Cost, Sums, merged, num_at, num_between, nums_within, single
from search_spaces.graph import Boundary, Choice, Vertex, after, source
from search_spaces.space import random_below


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Choices between the same two boundaries that cost the same."""

    start: Boundary
    stop: Boundary
    cost: Cost
    layers: tuple[Layer, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoundedPaths:
    """Made by `bounded_paths`; a window of it by `windowed`.

    limit: most latency and bytes. above: latency that paths must exceed, -1 for none.
    departures, arrivals: the moves from and to each boundary.
    before, suffix_counts: costs of the ways from the source to a boundary, and from a boundary to the sink.
    cut_states: every boundary at the cut, with every cost of reaching it from which some path stays within the limit.
    cumulative_counts: the number of such paths, accumulated over the cut_states.
    """

    limit: Cost
    above: int
    departures: dict[Boundary, list[Move]]
    arrivals: dict[Boundary, list[Move]]
    before: dict[Boundary, Sums]
    suffix_counts: dict[Boundary, Sums]
    cut_states: list[tuple[Boundary, Cost]]
    cumulative_counts: list[int]

    @property
    def num_paths(self) -> int:
        return self.cumulative_counts[-1] if self.cumulative_counts else 0


def bounded_paths(graph: nx.DiGraph, costs: dict[Vertex, Cost], limit: Cost) -> BoundedPaths:
    """The paths whose vertices (those in `costs`; the rest are free) sum to at most `limit`.

    Raises UserError if the costs are too many to tabulate.
    """
    departures, arrivals = _moves(graph, costs)
    levels: dict[int, list[Boundary]] = {}
    for vertex in graph:
        if isinstance(vertex, Boundary):
            levels.setdefault(vertex.depth, []).append(vertex)
    depth, cut = max(levels), max(levels) // 2
    before = {source(graph): single(costs[source(graph)])}
    for boundary in (boundary for level in range(1, cut + 1) for boundary in levels[level]):
        before[boundary] = merged((before[move.start], move.cost, len(move.layers)) for move in arrivals[boundary])
    suffix_counts = {boundary: single(costs[next(iter(graph.succ[boundary]))]) for boundary in levels[depth]}
    for boundary in (boundary for level in range(depth - 1, cut - 1, -1) for boundary in levels[level]):
        suffix_counts[boundary] = merged(
            (suffix_counts[move.stop], move.cost, len(move.layers)) for move in departures[boundary]
        )
    cut_states, nums = _joined(levels[cut], before, suffix_counts, limit, -1)
    return BoundedPaths(
        limit=limit,
        above=-1,
        departures=departures,
        arrivals=arrivals,
        before=before,
        suffix_counts=suffix_counts,
        cut_states=cut_states,
        cumulative_counts=list(accumulate(nums)),
    )


def windowed(paths: BoundedPaths, above: int, most: int) -> BoundedPaths:
    """Those of the paths whose latency is more than `above` and at most `most`, which is within their limit."""
    assert most <= paths.limit[0]
    cut, limit = [boundary for boundary in paths.before if boundary in paths.suffix_counts], (most, paths.limit[1])
    cut_states, nums = _joined(cut, paths.before, paths.suffix_counts, limit, above)
    return replace(paths, limit=limit, above=above, cut_states=cut_states, cumulative_counts=list(accumulate(nums)))


def draw(paths: BoundedPaths, rng: np.random.Generator) -> list[Layer]:
    """The layers of a path within the limits, drawn uniformly; there must be one."""
    index = bisect_right(paths.cumulative_counts, random_below(paths.num_paths, rng))
    boundary, cost = paths.cut_states[index]
    return [*_drawn_before(paths, boundary, cost, rng), *_drawn_after(paths, boundary, cost, rng)]


def layers_of_paths(paths: BoundedPaths) -> Iterator[tuple[Layer, ...]]:
    """The layers of every path within the limits, once each, by ascending cost of the first half."""
    for boundary, cost in paths.cut_states:
        for beginning in _ways_before(paths, boundary, cost):
            for ending in _ways_after(paths, boundary, paths.above - cost[0], _less(paths.limit, cost)):
                yield (*beginning, *ending)


def _ways_before(paths: BoundedPaths, boundary: Boundary, cost: Cost) -> Iterator[tuple[Layer, ...]]:
    if not boundary.depth:
        yield ()
    for move in paths.arrivals.get(boundary, ()):
        rest = _less(cost, move.cost)
        if num_at(paths.before[move.start], rest):
            yield from ((*way, layer) for way in _ways_before(paths, move.start, rest) for layer in move.layers)


def _ways_after(paths: BoundedPaths, boundary: Boundary, above: int, left: Cost) -> Iterator[tuple[Layer, ...]]:
    if boundary not in paths.departures:
        yield ()
    for move in paths.departures.get(boundary, ()):
        least, rest = above - move.cost[0], _less(left, move.cost)
        if num_between(paths.suffix_counts[move.stop], least, rest):
            yield from ((layer, *way) for layer in move.layers for way in _ways_after(paths, move.stop, least, rest))


def _moves(
    graph: nx.DiGraph, costs: dict[Vertex, Cost]
) -> tuple[dict[Boundary, list[Move]], dict[Boundary, list[Move]]]:
    alike: dict[tuple[Boundary, Boundary, Cost], list[Layer]] = {}
    for vertex in graph:
        if isinstance(vertex, Choice):
            (start,) = graph.pred[vertex]
            alike.setdefault((start, after(graph, vertex), costs[vertex]), []).append(vertex.layer)
    departures: dict[Boundary, list[Move]] = {}
    arrivals: dict[Boundary, list[Move]] = {}
    for (start, stop, cost), layers in alike.items():
        move = Move(start=start, stop=stop, cost=cost, layers=tuple(layers))
        departures.setdefault(start, []).append(move)
        arrivals.setdefault(stop, []).append(move)
    return departures, arrivals


def _joined(
    cut: Iterable[Boundary], before: dict[Boundary, Sums], suffix_counts: dict[Boundary, Sums], limit: Cost, above: int
) -> tuple[list[tuple[Boundary, Cost]], list[int]]:
    """Every way to reach the cut that can be completed within the limits, and the number of paths it begins."""
    cut_states: list[tuple[Boundary, Cost]] = []
    nums: list[int] = []
    for boundary in cut:
        reach = before[boundary]
        endings = nums_within(suffix_counts[boundary], limit[0] - reach.latency, limit[1] - reach.sent)
        if above >= 0:
            endings = endings - nums_within(suffix_counts[boundary], above - reach.latency, limit[1] - reach.sent)
        for row in np.flatnonzero(endings > 0):
            cut_states.append((boundary, (int(reach.latency[row]), int(reach.sent[row]))))
            nums.append(int(reach.num_paths[row]) * int(endings[row]))
    return cut_states, nums


def _drawn_before(paths: BoundedPaths, boundary: Boundary, cost: Cost, rng: np.random.Generator) -> list[Layer]:
    """Layers from the source to `boundary`, uniform over the ways that cost exactly `cost`; drawn backwards."""
    layers: list[Layer] = []
    while boundary.depth:
        moves = paths.arrivals[boundary]
        nums = [num_at(paths.before[move.start], _less(cost, move.cost)) * len(move.layers) for move in moves]
        move = moves[_drawn_index(nums, rng)]
        layers.insert(0, move.layers[random_below(len(move.layers), rng)])
        boundary, cost = move.start, _less(cost, move.cost)
    return layers


def _drawn_after(paths: BoundedPaths, boundary: Boundary, cost: Cost, rng: np.random.Generator) -> list[Layer]:
    """Layers from `boundary`, reached at `cost`, to the last, uniform over the ways that stay within the limits."""
    layers: list[Layer] = []
    above, left = paths.above - cost[0], _less(paths.limit, cost)
    while boundary in paths.departures:
        moves = paths.departures[boundary]
        nums = [
            num_between(paths.suffix_counts[move.stop], above - move.cost[0], _less(left, move.cost)) * len(move.layers)
            for move in moves
        ]
        move = moves[_drawn_index(nums, rng)]
        layers.append(move.layers[random_below(len(move.layers), rng)])
        boundary, above, left = move.stop, above - move.cost[0], _less(left, move.cost)
    return layers


def _drawn_index(weights: Sequence[int], rng: np.random.Generator) -> int:
    cumulative_counts = list(accumulate(weights))
    return bisect_right(cumulative_counts, random_below(cumulative_counts[-1], rng))


def _less(first: Cost, second: Cost) -> Cost:
    return first[0] - second[0], first[1] - second[1]
