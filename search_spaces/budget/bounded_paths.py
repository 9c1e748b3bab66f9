"""Counts the paths of a layered graph within cost limits exactly, and draws them uniformly, without rejection.

Paths are cut at the middle layer. Tables hold how many ways lead from the source to each boundary up to the cut, and
from each boundary after it to the sink, and at which cost; a path is within the limit if its halves are together. This
keeps tables at a few thousand rows, where whole paths have tens of thousands of distinct costs.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from operator import mul
from typing import Literal, NamedTuple, TypeAlias

import networkx as nx
import numpy as np

from search_spaces.architecture import Layer
from search_spaces.budget.cost_counts import Cost, Sums, Way, kept, num_at, num_between, nums_within, prolonged, single
from search_spaces.budget.edges import Edge, edges_by_depth
from search_spaces.graph import Vertex
from search_spaces.space import random_below

At: TypeAlias = tuple[int, int]  # a boundary: its depth and its number within the level


class Move(NamedTuple):
    """Choices between the same two boundaries with the same cost."""

    start: At
    stop: At
    cost: Cost
    layers: list[Layer]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoundedPaths:
    """The paths within limits, made by `bounded_paths`, or by `windowed` for a window of them.

    Attributes:
        limit, above: Greatest cost in every measure; bound that paths exceed in the first measure, -1 for none.
        departures, arrivals: Moves from and to each boundary.
        before, suffix_counts: Costs of the ways from the source to a boundary, and from a boundary to the sink.
        cut_states: Boundaries at the cut, each with every row of `before` that begins a path within the limit.
        cumulative_counts: Number of such paths, accumulated over `cut_states`.
    """

    limit: Cost
    above: int
    departures: dict[At, list[Move]]
    arrivals: dict[At, list[Move]]
    before: dict[At, Sums]
    suffix_counts: dict[At, Sums]
    cut_states: list[tuple[At, int]] = field(default_factory=list)
    cumulative_counts: list[int] = field(default_factory=list)

    @property
    def num_paths(self) -> int:
        return self.cumulative_counts[-1] if self.cumulative_counts else 0


def bounded_paths(graph: nx.DiGraph, costs: dict[Vertex, Cost], limit: Cost) -> BoundedPaths:
    """Return the paths whose vertices cost at most `limit` in sum; vertices that are not in `costs` are free.

    A UserError is raised if there are too many costs to tabulate.
    """
    levels = edges_by_depth(graph)
    departures, arrivals = _moves(levels, costs)
    cut, last = len(levels) // 2, len(levels)
    free = single((0,) * len(limit))
    before, left = {(0, 0): free}, _left(limit, departures, "stop")
    for depth in range(1, cut + 1):
        moves = (move for at, moves_there in arrivals.items() if at[0] == depth for move in moves_there)
        before |= _onward(before, [Way(move.start, move.stop, move.cost, len(move.layers)) for move in moves], left)
    suffix_counts, left = {at: free for at in arrivals if at[0] == last}, _left(limit, arrivals, "start")
    for depth in reversed(range(cut, last)):
        moves = (move for at, moves_there in departures.items() if at[0] == depth for move in moves_there)
        ways = [Way(move.stop, move.start, move.cost, len(move.layers)) for move in moves]
        suffix_counts |= _onward(suffix_counts, ways, left)
    tables = BoundedPaths(
        limit=limit, above=-1, departures=departures, arrivals=arrivals, before=before, suffix_counts=suffix_counts
    )
    return _limited(tables, limit, -1)


def windowed(paths: BoundedPaths, above: int, most: int) -> BoundedPaths:
    """Return the paths that cost more than `above` and at most `most` in the first measure, within their limits."""
    assert most <= paths.limit[0]
    return _limited(paths, (most, *paths.limit[1:]), above)


def _onward(sums: dict[At, Sums], ways: Sequence[Way[At]], left: dict[At, Cost]) -> dict[At, Sums]:
    """Return the costs at the boundaries that ways lead to, without those that no path completes within the limit."""
    reached = prolonged({way.start: sums[way.start] for way in ways}, ways)
    within = {at: reached[at] for at in sorted(reached)}
    return {at: kept(sums, (sums.costs <= left.get(at, sums.costs)).all(axis=1)) for at, sums in within.items()}


def _left(limit: Cost, moves: dict[At, list[Move]], end: Literal["start", "stop"]) -> dict[At, Cost]:
    """Return what a limit leaves at each boundary after the cheapest moves from it to that end, measure by measure."""
    left: dict[At, Cost] = {}
    for at in sorted(moves, reverse=end == "stop"):
        after = (_less(left.get(getattr(move, end), limit), move.cost) for move in moves[at])
        left[at] = tuple(map(max, zip(*after, strict=True)))
    return left


def _limited(paths: BoundedPaths, limit: Cost, above: int) -> BoundedPaths:
    """Find the states at the cut that can be completed within the limits, and count the paths of each."""
    cut_states: list[tuple[At, int]] = []
    nums: list[int] = []
    for at in (at for at in paths.before if at in paths.suffix_counts):
        reach, rest = paths.before[at], paths.suffix_counts[at]
        endings = nums_within(rest, np.array(limit, dtype=np.int64) - reach.costs)
        if above >= 0:
            endings = endings - nums_within(rest, np.array((above, *limit[1:]), dtype=np.int64) - reach.costs)
        rows = np.flatnonzero(endings > 0)
        cut_states += zip(repeat(at), rows.tolist())
        nums += map(mul, reach.num_paths[rows].tolist(), endings[rows].tolist())
    return replace(paths, limit=limit, above=above, cut_states=cut_states, cumulative_counts=list(accumulate(nums)))


def _moves(levels: list[list[Edge]], costs: dict[Vertex, Cost]) -> tuple[dict[At, list[Move]], dict[At, list[Move]]]:
    alike: dict[tuple[At, At, Cost], Move] = {}
    departures: dict[At, list[Move]] = {}
    arrivals: dict[At, list[Move]] = {}
    for depth, edges in enumerate(levels):
        for edge in edges:
            key = (depth, edge.start), (depth + 1, edge.stop), edge.cost(costs)
            if key not in alike:
                alike[key] = Move(*key, [])
                departures.setdefault(key[0], []).append(alike[key])
                arrivals.setdefault(key[1], []).append(alike[key])
            alike[key].layers.append(edge.choice.layer)
    return departures, arrivals


def draw(paths: BoundedPaths, rng: np.random.Generator) -> list[Layer]:
    """Draw the layers of a path within the limits uniformly; there must be one."""
    index = bisect_right(paths.cumulative_counts, random_below(paths.num_paths, rng))
    at, cost = _at_cut(paths, *paths.cut_states[index])
    return [*_drawn_before(paths, at, cost, rng), *_drawn_after(paths, at, cost, rng)]


def layers_of_paths(paths: BoundedPaths) -> Iterator[tuple[Layer, ...]]:
    """Yield the layers of every path within the limits once, by ascending cost of the first half."""
    for at, cost in (_at_cut(paths, *state) for state in paths.cut_states):
        for beginning in _ways_before(paths, at, cost):
            for ending in _ways_after(paths, at, paths.above - cost[0], _less(paths.limit, cost)):
                yield (*beginning, *ending)


def _at_cut(paths: BoundedPaths, at: At, row: int) -> tuple[At, Cost]:
    return at, tuple(map(int, paths.before[at].costs[row]))


def _ways_before(paths: BoundedPaths, at: At, cost: Cost) -> Iterator[tuple[Layer, ...]]:
    if not at[0]:
        yield ()
    for move in paths.arrivals.get(at, ()):
        rest = _less(cost, move.cost)
        if num_at(paths.before[move.start], rest):
            yield from ((*way, layer) for way in _ways_before(paths, move.start, rest) for layer in move.layers)


def _ways_after(paths: BoundedPaths, at: At, above: int, left: Cost) -> Iterator[tuple[Layer, ...]]:
    if at not in paths.departures:
        yield ()
    for move in paths.departures.get(at, ()):
        least, rest = above - move.cost[0], _less(left, move.cost)
        if num_between(paths.suffix_counts[move.stop], least, rest):
            yield from ((layer, *way) for layer in move.layers for way in _ways_after(paths, move.stop, least, rest))


def _drawn_before(paths: BoundedPaths, at: At, cost: Cost, rng: np.random.Generator) -> list[Layer]:
    """Draw layers from the source to a boundary backwards, uniformly among the ways that cost exactly `cost`."""
    layers: list[Layer] = []
    while at[0]:
        moves = paths.arrivals[at]
        nums = [num_at(paths.before[move.start], _less(cost, move.cost)) * len(move.layers) for move in moves]
        move = moves[_drawn_index(nums, rng)]
        layers.insert(0, move.layers[random_below(len(move.layers), rng)])
        at, cost = move.start, _less(cost, move.cost)
    return layers


def _drawn_after(paths: BoundedPaths, at: At, cost: Cost, rng: np.random.Generator) -> list[Layer]:
    """Draw layers from a boundary to the last, uniformly among the ways that stay within the limits."""
    layers: list[Layer] = []
    above, left = paths.above - cost[0], _less(paths.limit, cost)
    while at in paths.departures:
        moves = paths.departures[at]
        nums = [
            num_between(paths.suffix_counts[move.stop], above - move.cost[0], _less(left, move.cost)) * len(move.layers)
            for move in moves
        ]
        move = moves[_drawn_index(nums, rng)]
        layers.append(move.layers[random_below(len(move.layers), rng)])
        at, above, left = move.stop, above - move.cost[0], _less(left, move.cost)
    return layers


def _drawn_index(weights: Sequence[int], rng: np.random.Generator) -> int:
    cumulative_counts = list(accumulate(weights))
    return bisect_right(cumulative_counts, random_below(cumulative_counts[-1], rng))


def _less(first: Cost, second: Cost) -> Cost:
    return tuple(part - other for part, other in zip(first, second, strict=True))
