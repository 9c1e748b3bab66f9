"""Counts the paths of a layered graph within cost limits by a dynamic program over layers, and draws them uniformly.

A cost is a tuple of non-negative integers, one per measure, in units that the caller chooses. Paths are cut at the
middle boundary. Up to the cut, a table per level has the distinct costs of the partial paths from the source to each
boundary, and how many of these paths have each cost; from the cut on, a table has the same for the partial paths to the
sink. A path is within the limit if the sum of its halves is. Tables are small, because halves have far fewer distinct
costs than whole paths.
"""

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import mul, sub
from typing import Any, NamedTuple, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from search_spaces.architecture import Layer
from search_spaces.budget.together import sums_together
from search_spaces.graph import Cost, Vertex, edges_by_depth
from search_spaces.space import random_below

Ints: TypeAlias = NDArray[np.int64]
Index: TypeAlias = NDArray[np.intp]
Counts: TypeAlias = NDArray[Any]  # of 64-bit or, where those would not do, Python integers

EXACT_ADDITIONS = 2 * 10**8  # limit of additions of counts on a side of the cut: seconds; GPT-2 small needs 1.5e8
ROUNDED_ADDITIONS = 10**8  # the same for rounded costs, where counts have more digits and several tables are tried
MAX_STEPS = 12 * 10**9  # limit of steps to pair halves of paths in several measures: some ten seconds
MAX_ROWS = 2**22  # largest number of rows of a table
BATCH = 2**23  # sums that are sorted at once: 64 MB
DIGIT = 40  # bits of a digit of a count, so that sums of digits over all rows or moves fit in 64 bits
ODD = np.append(1, 2 * np.random.default_rng(0).integers(2**62, size=63) + 1)  # hash factors, one per measure


class Move(NamedTuple):
    """Choices of equal cost between two boundaries. start, stop: index of each boundary among those of its depth."""

    start: int
    stop: int
    cost: Cost
    layers: list[Layer]


class Half(NamedTuple):
    """The layers of half a path that are still to be drawn, from boundary number `place` of a depth on.

    After the cut, they lead to the sink, and cost at most `left`, and more than `above` in the first measure. Before
    the cut, they lead back to the source and cost exactly `left`, and `above` is None.
    """

    depth: int
    place: int
    above: int | None
    left: Cost


@dataclass(frozen=True, eq=False)
class Table:
    """How many partial paths have each cost, for each boundary of a depth.

    Partial paths lead from the source to the boundary in tables before the cut, and from the boundary to the sink after
    it. costs: rows x measures, in lexicographic order. digits: boundaries x digits x rows: how many of a boundary's
    partial paths have the cost of a row, in base 2^DIGIT, least digit first.
    """

    costs: Ints
    digits: Ints

    @cached_property
    def counts(self) -> list[Counts]:
        """For each boundary, the number of partial paths with the cost of each row."""
        powers = 2.0 ** (DIGIT * np.arange(self.digits.shape[1]))
        kinds = (np.int64 if powers @ place.sum(axis=1, dtype=np.float64) < 2**62 else object for place in self.digits)
        pairs = zip(self.digits, kinds, strict=True)
        return [sum(digit.astype(kind) << DIGIT * at for at, digit in enumerate(place)) for place, kind in pairs]

    @cached_property
    def cumulative_counts(self) -> list[Counts] | None:
        """Per boundary, the number of paths in the first 0, 1, ... rows; None if a measure after the first is not 0."""
        return None if self.costs[:, 1:].any() else [np.append(0, np.cumsum(counts)) for counts in self.counts]

    def num_at(self, place: int, cost: Cost) -> int:
        """Return the number of partial paths of boundary `place` with exactly this cost."""
        start, stop = (self.costs[:, 0].searchsorted(cost[0], side=side) for side in ("left", "right"))
        equal = (self.costs[start:stop, 1:] == cost[1:]).all(axis=1)
        return int(self.counts[place][start:stop][equal].sum())

    def num_within(self, place: int, limit: Cost) -> int:
        """Return the number of partial paths of boundary `place` that cost at most `limit` in every measure."""
        stop = self.costs[:, 0].searchsorted(limit[0], side="right")
        if self.cumulative_counts is not None:
            return int(self.cumulative_counts[place][stop]) if min(limit[1:], default=0) >= 0 else 0
        return int(self.counts[place][:stop][(self.costs[:stop, 1:] <= limit[1:]).all(axis=1)].sum())

    def num_between(self, place: int, above: int, limit: Cost) -> int:
        """Return how many of the paths that `num_within` counts cost more than `above` in the first measure.

        above: at most `limit[0]`; all paths count if it is negative.
        """
        within = self.num_within(place, limit)
        return within - (self.num_within(place, (above, *limit[1:])) if above >= 0 else 0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoundedPaths:
    """The paths within limits, made by `bounded_paths`, or by `windowed` for a range of costs in the first measure.

    limit: Greatest cost in every measure. above: Exclusive lower bound of the first measure; -1 for none.
    moves: The moves of each depth.
    tables: A table per depth: of partial paths from the source before the cut, and to the sink from the cut on.
    before: The table of partial paths from the source to the cut.
    cut_states: Pairs of a boundary at the cut and a row of `before` that begin a path within the limits: pairs x 2.
    cumulative_counts: For each pair, the number of paths that begin with it or an earlier pair.
    """

    limit: Cost
    above: int
    moves: list[list[Move]]
    tables: list[Table]
    before: Table
    cut_states: Index = field(default_factory=lambda: np.zeros((0, 2), dtype=np.intp))
    cumulative_counts: list[int] = field(default_factory=list)

    @property
    def num_paths(self) -> int:
        return self.cumulative_counts[-1] if self.cumulative_counts else 0

    @property
    def cut(self) -> int:
        """The depth of the boundaries at which paths are cut."""
        return len(self.moves) // 2


def bounded_paths(
    graph: nx.DiGraph, costs: dict[Vertex, Cost], limit: Cost, max_additions: int = EXACT_ADDITIONS
) -> BoundedPaths | None:
    """Return the paths whose vertices cost at most `limit` in total; None if there are too many costs to tabulate.

    There are too many if the tables on a side of the cut need more than `max_additions` additions of counts, a table
    needs more than MAX_ROWS rows, or pairing the halves of paths takes more than MAX_STEPS steps. The result is also
    None if two costs have the same hash, which is most unlikely.
    """
    moves: list[list[Move]] = []
    for edges in edges_by_depth(graph):
        alike: dict[tuple[int, int, Cost], Move] = {}
        for edge in edges:
            key = edge.start, edge.stop, edge.cost(costs)
            alike.setdefault(key, Move(*key, [])).layers.append(edge.choice.layer)
        moves.append(list(alike.values()))
    cut = len(moves) // 2
    backward = [[move._replace(start=move.stop, stop=move.start) for move in level] for level in reversed(moves)]
    known: dict[Hashable, Table] = {}
    before = _tables(moves[:cut], _left(limit, backward)[::-1], max_additions, known)
    after = before and _tables(backward[: len(moves) - cut], _left(limit, moves)[::-1], max_additions, known)
    if not before or not after:
        return None
    tables = [*before[:-1], *reversed(after)]
    paths = BoundedPaths(limit=limit, above=-1, moves=moves, tables=tables, before=before[-1])
    endings = _endings(paths, limit, -1, MAX_STEPS)
    return None if endings is None else _limited(paths, limit, -1, endings)


def windowed(paths: BoundedPaths, above: int, most: int) -> BoundedPaths:
    """Return the paths within `paths.limit` that cost more than `above` and at most `most` in the first measure.

    most: at most `paths.limit[0]`.
    """
    assert most <= paths.limit[0]
    limit = most, *paths.limit[1:]
    endings = _endings(paths, limit, above)
    assert endings is not None
    return _limited(paths, limit, above, endings)


def _left(limit: Cost, levels: Sequence[Sequence[Move]]) -> list[Ints]:
    """Return what a limit leaves after the cheapest way to each boundary, measure by measure, by level."""
    left = [np.array([limit] * (1 + max(move.start for move in levels[0])), dtype=np.int64)]
    for moves in levels:
        after = np.full((1 + max(move.stop for move in moves), len(limit)), np.iinfo(np.int64).min)
        for move in moves:
            after[move.stop] = np.maximum(after[move.stop], left[-1][move.start] - move.cost)
        left.append(after)
    return left


def _tables(
    levels: Sequence[Sequence[Move]], left: Sequence[Ints], max_additions: int, known: dict[Hashable, Table]
) -> list[Table] | None:
    """Return the table of each level, the first with one way of no cost to each place; None if they are too large.

    `left` is the most that a way to each place of a level may cost to be completed within the limit. `known` holds
    tables without what all first moves cost, by what they are made of, so that equal layers are tabulated once.
    """
    least_digits = max(1, np.count_nonzero(left[0][0]))  # a measure takes about as long as a digit
    tables = [Table(np.zeros((1, left[0].shape[1]), dtype=np.int64), np.ones((len(left[0]), 1, 1), dtype=np.int64))]
    if not levels:
        return tables
    base = np.min([move.cost for move in levels[0]], axis=0)
    levels = [[move._replace(cost=tuple(map(sub, move.cost, base))) for move in levels[0]], *levels[1:]]
    made_of: Hashable = len(left[0])
    for depth, moves in enumerate(levels):
        rows, digits = len(tables[-1].costs), tables[-1].digits.shape[1]
        if rows * max(digits, least_digits) * sum(map(len, levels[depth:])) > max_additions:
            return None  # since tables do not become smaller
        further = sum(map(len, levels[depth + 1 :]))
        most_rows = min(MAX_ROWS, max_additions // (further * least_digits)) if further else MAX_ROWS
        alike = frozenset((move.start, move.stop, move.cost, len(move.layers)) for move in moves)
        most = left[depth + 1] - base
        made_of = made_of, alike, most.tobytes()
        if made_of not in known:
            table = _extended(tables[-1], moves, most, most_rows)
            if table is None:
                return None
            known[made_of] = table
        tables.append(known[made_of])
    return [tables[0], *(replace(table, costs=table.costs + base) for table in tables[1:])]


def _extended(table: Table, moves: Sequence[Move], left: Ints, most_rows: int) -> Table | None:
    """Return the table of all ways extended by a move that cost at most `left`; None if it is too large.

    That is if it has more than `most_rows` costs as far as `left` cuts none off, or more than MAX_ROWS before it does.
    A cost is found by its key, the sum of its measures times odd numbers modulo 2^64. All measures but the first are
    compared, which shows whether two costs share a key, since the key determines the first. Such a table is not
    returned either; with MAX_ROWS costs, the chance is 5e-7.
    """
    odd = ODD[: table.costs.shape[1]]
    by_cost: dict[Cost, list[Move]] = {}
    for move in moves:
        by_cost.setdefault(move.cost, []).append(move)
    order = np.argsort(table.costs @ odd, kind="stable")
    costs, digits = table.costs[order], table.digits[:, :, order]
    held = [np.flatnonzero(place.any(axis=0)) for place in digits]
    kinds = set(map(_starts, by_cost.values()))
    used = {starts: np.unique(np.concatenate([held[start] for start in starts])) for starts in kinds}
    keys = {starts: costs[rows] @ odd for starts, rows in used.items()}
    inside = {starts: {start: rows.searchsorted(held[start]) for start in starts} for starts, rows in used.items()}
    greatest = table.costs.max(axis=0, initial=0) + np.max(list(by_cost), axis=0)
    most_rows = most_rows if (greatest <= left.min(axis=0)).all() else MAX_ROWS
    reached = _distinct((keys[_starts(alike)] + np.array(cost) @ odd for cost, alike in by_cost.items()), most_rows)
    if len(reached) > most_rows:
        return None
    sums = np.full((table.costs.shape[1], len(reached)), -1, dtype=np.int64)
    nums = np.zeros((len(left), digits.shape[1] + 1, len(reached)), dtype=np.int64)
    for cost, alike in by_cost.items():
        rows = used[_starts(alike)]
        at = reached.searchsorted(keys[_starts(alike)] + np.array(cost) @ odd)
        for measure, column in enumerate(sums[1:], 1):
            before, after = column[at], costs[rows, measure] + cost[measure]
            if not ((before == after) | (before < 0)).all():
                return None
            column[at] = after
        for move in alike:
            stop = at[inside[_starts(alike)][move.start]]
            for digit, old in enumerate(digits[move.start]):
                nums[move.stop, digit][stop] += old[held[move.start]] * len(move.layers)
    sums[0] = reached - odd[1:] @ sums[1:]
    for digit in range(digits.shape[1]):
        nums[:, digit + 1] += nums[:, digit] >> DIGIT
        nums[:, digit] &= 2**DIGIT - 1
    for place, most in enumerate(left):
        nums[place][:, (most < sums.T).any(axis=1)] = 0
    nums = nums[:, : 1 + max(np.flatnonzero(nums.any(axis=(0, 2))), default=0)]
    order = np.lexsort(sums[::-1])
    order = order[nums.any(axis=(0, 1))[order]]
    return Table(sums.T[order], nums[:, :, order])


def _starts(moves: Iterable[Move]) -> frozenset[int]:
    return frozenset(move.start for move in moves)


def _distinct(parts: Iterable[Ints], most: int) -> Ints:
    """Return the distinct numbers of parts, in order; some of them, but more than `most`, if there are more."""
    whole, waiting, end = np.zeros(0, dtype=np.int64), list[Ints](), np.zeros(0, dtype=np.int64)
    for part in chain(parts, [end]):
        waiting.append(part)
        if part is end or sum(map(len, waiting)) > min(BATCH, 8 * most):
            whole = np.sort(np.concatenate([whole, *waiting]), kind="stable")  # fastest on parts that ascend
            whole = whole[np.append(True, whole[1:] != whole[:-1])[: len(whole)]]
            waiting.clear()
            if len(whole) > most:
                break
    return whole


def _limited(paths: BoundedPaths, limit: Cost, above: int, endings: list[Counts]) -> BoundedPaths:
    """Find the halves at the cut that can be completed within the limits, and count the paths of each."""
    states: list[Index] = []
    nums: list[int] = []
    for place, (counts, ends) in enumerate(zip(paths.before.counts, endings, strict=True)):
        rows = np.flatnonzero((ends > 0) & (counts > 0))
        states.append(np.column_stack([np.full_like(rows, place), rows]))
        nums += map(mul, counts[rows].tolist(), ends[rows].tolist())
    cumulative_counts = list(accumulate(nums))
    return replace(
        paths, limit=limit, above=above, cut_states=np.concatenate(states), cumulative_counts=cumulative_counts
    )


def _endings(paths: BoundedPaths, limit: Cost, above: int, max_steps: float = math.inf) -> list[Counts] | None:
    """Return the number of ways to complete each cost at each boundary of the cut; None beyond `max_steps`."""
    before, after = paths.before, paths.tables[paths.cut]
    costs, others = before.costs, after.costs
    if after.cumulative_counts is not None:
        stop, start = (others[:, 0].searchsorted(most - costs[:, 0], side="right") for most in (limit[0], above))
        return [counts[stop] - counts[start] for counts in after.cumulative_counts]
    if above >= 0:  # as one more measure, of which there is the less, the more the first one is
        costs, others = (np.column_stack([table, -table[:, 0]]) for table in (costs, others))
        limit = *limit, -above - 1
    sums = sums_together(costs, others, limit, after.digits.reshape(-1, len(others)), max_steps)
    return None if sums is None else replace(before, digits=sums.reshape(*after.digits.shape[:2], -1)).counts


def draw(paths: BoundedPaths, rng: np.random.Generator) -> list[Layer]:
    """Draw a path within the limits uniformly and return its layers; there must be such a path."""
    before, after = _halves(paths, bisect_right(paths.cumulative_counts, random_below(paths.num_paths, rng)))
    return [*reversed(_drawn(paths, before, rng)), *_drawn(paths, after, rng)]


def layers_of_paths(paths: BoundedPaths) -> Iterator[tuple[Layer, ...]]:
    """Yield the layers of every path once, in order of the boundary at the cut, then of the cost of the first half."""
    for number in range(len(paths.cut_states)):
        before, after = _halves(paths, number)
        for beginning in _ways(paths, before):
            for ending in _ways(paths, after):
                yield (*beginning, *ending)


def _halves(paths: BoundedPaths, number: int) -> tuple[Half, Half]:
    """Return what is left for the layers before and after the cut, of one of the states there."""
    place, row = map(int, paths.cut_states[number])
    cost = tuple(map(int, paths.before.costs[row]))
    left = tuple(map(sub, paths.limit, cost))
    return Half(paths.cut, place, None, cost), Half(paths.cut, place, paths.above - cost[0], left)


def _options(paths: BoundedPaths, half: Half) -> list[tuple[int, Move, Half]]:
    """Return the moves that continue a way, each with the number of ways and what is left after it."""
    is_backward = half.above is None
    depth = half.depth - is_backward
    options: list[tuple[int, Move, Half]] = []
    for move in paths.moves[depth] if 0 <= depth < len(paths.moves) else ():
        here, there = (move.stop, move.start) if is_backward else (move.start, move.stop)
        if here != half.place:
            continue
        left = tuple(map(sub, half.left, move.cost))
        if half.above is None:
            num, rest = paths.tables[depth].num_at(there, left), Half(depth, there, None, left)
        else:
            above = half.above - move.cost[0]
            num, rest = paths.tables[depth + 1].num_between(there, above, left), Half(depth + 1, there, above, left)
        if num:
            options.append((num * len(move.layers), move, rest))
    return options


def _drawn(paths: BoundedPaths, half: Half, rng: np.random.Generator) -> list[Layer]:
    """Draw the layers of a way uniformly, from the cut on."""
    layers: list[Layer] = []
    while options := _options(paths, half):
        cumulative_counts = list(accumulate(num for num, _, _ in options))
        _, move, half = options[bisect_right(cumulative_counts, random_below(cumulative_counts[-1], rng))]
        layers.append(move.layers[random_below(len(move.layers), rng)])
    return layers


def _ways(paths: BoundedPaths, half: Half) -> Iterator[tuple[Layer, ...]]:
    """Yield the layers of every way, the first layer first."""
    options = _options(paths, half)
    if not options:  # an end of the graph, since only what can be continued is an option
        yield ()
    for _, move, rest in options:
        if half.above is None:
            yield from ((*way, layer) for way in _ways(paths, rest) for layer in move.layers)
        else:
            yield from ((layer, *way) for layer in move.layers for way in _ways(paths, rest))
