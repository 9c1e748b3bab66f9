"""Exact counts of paths by cost, and queries of them for a budget.

A cost is a tuple of non-negative integers, one per measure, in units that the caller chooses. Counts are 64-bit
integers as long as they fit, which half of 12 layers does, and otherwise Python integers in object arrays.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import UserError

Cost: TypeAlias = tuple[int, ...]
Ints: TypeAlias = NDArray[np.int64]
Index: TypeAlias = NDArray[np.intp]
Place = TypeVar("Place")  # key of a table
Counts: TypeAlias = NDArray[Any]  # of 64-bit or Python integers

MAX_ROWS = 4_000_000
BATCH_ROWS = 8_000_000  # sorted at once: 64 MB
MAX_COUNT = 2**62  # most paths of a table of 64-bit counts


class Way(NamedTuple, Generic[Place]):
    """Alternatives of equal cost, `times` of them, that extend paths of table `start` to paths of table `stop`."""

    start: Place
    stop: Place
    cost: Cost
    times: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Distinct costs, rows x measures, in lexicographic order; `num_paths[i]` paths have cost i."""

    costs: Ints
    num_paths: Counts

    @cached_property
    def cumulative_counts(self) -> Counts | None:
        """The number of paths of the first i costs, if costs differ in the first measure only; otherwise None."""
        return None if self.costs[:, 1:].any() else np.concatenate([[0], np.cumsum(self.num_paths)])


def added(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs, measure by measure; there must be one."""
    return tuple(map(sum, zip(*costs, strict=True)))


def single(cost: Cost) -> Sums:
    """Return the table of one path with this cost."""
    return Sums(costs=np.array([cost], dtype=np.int64), num_paths=np.array([1], dtype=np.int64))


def prolonged(tables: Mapping[Place, Sums], ways: Iterable[Way[Place]]) -> dict[Place, Sums]:
    """Return the costs of all paths of the tables extended by the ways, by the table that a way leads to.

    The tables of a level share most of their costs, so the costs are joined once for all of them. A UserError is raised
    if there are more than MAX_ROWS distinct costs.
    """
    alike: dict[Cost, list[Way[Place]]] = {}
    for way in ways:
        alike.setdefault(way.cost, []).append(way)
    total = sum(int(tables[way.start].num_paths.sum()) * way.times for same in alike.values() for way in same)
    kind: Any = np.int64 if total <= MAX_COUNT else object
    old = {start: sums.num_paths.astype(kind) for start, sums in tables.items()}
    starts = {cost: frozenset(way.start for way in same) for cost, same in alike.items()}
    reached, every_place = _reached(tables, starts)
    stops = dict.fromkeys(way.stop for same in alike.values() for way in same)
    nums = {stop: np.zeros(len(reached), dtype=kind) for stop in stops}
    for same, places in zip(alike.values(), every_place, strict=True):
        for way in same:
            nums[way.stop][places[way.start]] += old[way.start] * way.times
    order = np.lexsort(reached.T[::-1])
    costs = reached[order]
    whole = {stop: Sums(costs=costs, num_paths=num_paths[order]) for stop, num_paths in nums.items()}
    return {stop: kept(sums, sums.num_paths != 0) for stop, sums in whole.items()}


def _reached(
    tables: Mapping[Place, Sums], starts: Mapping[Cost, frozenset[Place]]
) -> tuple[Ints, Iterator[dict[Place, Index]]]:
    """Return all extended costs, in any order, and for each way's cost the places of each table's rows among them.

    `starts` maps a way's cost to the tables that it extends. A cost is looked up by a number: the sum of its measures
    times odd numbers, modulo 2^64. All measures but one are compared, which shows whether two costs share a number,
    since the number determines the last measure; if two do, other odd numbers are tried.
    """
    for odd in _odd_numbers(len(next(iter(starts)))):
        joined, places = _joined(tables, odd)
        rows = {used: np.unique(np.concatenate([places[start] for start in used])) for used in set(starts.values())}
        inside = {used: {start: rows[used].searchsorted(places[start]) for start in used} for used in rows}
        numbers = {used: joined[kept] @ odd for used, kept in rows.items()}
        new = _distinct(numbers[used] + _number(cost, odd) for cost, used in starts.items())
        sums = (numbers[used] + _number(cost, odd) for cost, used in starts.items())
        at = [new.searchsorted(part).astype(np.int32) for part in sums]  # 4 bytes each: there are tens of millions
        costs = np.full((len(odd), len(new)), -1, dtype=np.int64)
        is_sound = True
        for measure, column in enumerate(costs[1:], 1):
            before = {used: joined[kept, measure] for used, kept in rows.items()}
            for (cost, used), stop in zip(starts.items(), at, strict=True):
                after, known = before[used] + cost[measure], column[stop]
                is_sound &= bool(((known == after) | (known < 0)).all())
                column[stop] = after
        if is_sound:
            costs[0] = new - odd[1:] @ costs[1:]
            ways = zip(starts.values(), at, strict=True)
            return costs.T, ({start: stop[inside[used][start]] for start in used} for used, stop in ways)
    raise AssertionError("odd numbers do not end")


def _odd_numbers(num_measures: int) -> Iterator[Ints]:
    rng = np.random.default_rng(0)
    while True:
        yield np.append(np.int64(1), 2 * rng.integers(2**62, size=num_measures - 1) + 1)


def _number(cost: Cost, odd: Ints) -> np.int64:
    return np.int64((np.array(cost, dtype=np.int64) * odd).sum())


def _joined(tables: Mapping[Place, Sums], odd: Ints) -> tuple[Ints, dict[Place, Index]]:
    """Return the distinct costs of all tables by ascending number, and the places of each table's rows among them."""
    stacked = np.concatenate([sums.costs for sums in tables.values()])
    _, firsts, places = np.unique(stacked @ odd, return_index=True, return_inverse=True)
    ends = np.cumsum([len(sums.num_paths) for sums in tables.values()])[:-1]
    return stacked[firsts], dict(zip(tables, np.split(places, ends), strict=True))


def _distinct(parts: Iterable[Ints]) -> Ints:
    whole, waiting, num_waiting = np.zeros(0, dtype=np.int64), list[Ints](), 0
    for part in parts:
        waiting.append(part)
        num_waiting += len(part)
        if num_waiting > BATCH_ROWS:
            whole, waiting, num_waiting = _merged([whole, *waiting]), [], 0
    return _merged([whole, *waiting])


def _merged(parts: list[Ints]) -> Ints:
    """Merge ascending parts without repetition; a stable sort is fastest on ascending runs (modulo 2^64)."""
    numbers: Ints = np.sort(np.concatenate(parts), kind="stable")
    numbers = numbers[np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]]
    if len(numbers) > MAX_ROWS:
        raise UserError(
            f"the budget needs a table of at most {MAX_ROWS} distinct costs, but this space under this protocol needs "
            f"{len(numbers)} or more; give fewer budgets, or fewer choices per layer."
        )
    return numbers


def kept(sums: Sums, which: NDArray[np.bool_]) -> Sums:
    return sums if which.all() else Sums(costs=sums.costs[which], num_paths=sums.num_paths[which])


def num_at(sums: Sums, cost: Cost) -> int:
    """Return the number of paths with exactly this cost."""
    first = sums.costs[:, 0]
    start, stop = first.searchsorted(cost[0]), first.searchsorted(cost[0], side="right")
    equal = (sums.costs[start:stop, 1:] == cost[1:]).all(axis=1)
    return int(sums.num_paths[start:stop][equal].sum())


def num_within(sums: Sums, limit: Cost) -> int:
    """Return the number of paths that cost at most `limit` in every measure."""
    stop = sums.costs[:, 0].searchsorted(limit[0], side="right")
    if sums.cumulative_counts is not None:
        return int(sums.cumulative_counts[stop]) if min(limit[1:], default=0) >= 0 else 0
    return int(sums.num_paths[:stop][(sums.costs[:stop, 1:] <= limit[1:]).all(axis=1)].sum())


def num_between(sums: Sums, above: int, limit: Cost) -> int:
    """Return the number of paths that cost at most `limit`, and in the first measure more than `above`."""
    return num_within(sums, limit) - (num_within(sums, (above, *limit[1:])) if above >= 0 else 0)


def nums_within(sums: Sums, limits: Ints) -> Counts:
    """Return `num_within` of many limits (limits x measures) in O((rows + limits) log(rows)^(measures - 1)).

    Source: Claude, Navarro and Ordonez 2015, "The wavelet matrix: an efficient wavelet tree for large alphabets",
    https://doi.org/10.1016/j.is.2014.06.002, for counting in two dimensions, applied recursively for more.
    """
    first, *others = sums.costs.T
    stop = np.searchsorted(first, limits[:, 0], side="right")
    ranked = [np.unique(other, return_inverse=True) for other in others if other.any()]
    bounds = [column for other, column in zip(others, limits.T[1:], strict=True) if other.any()]
    below = [np.searchsorted(values, bound, side="right") for (values, _), bound in zip(ranked, bounds, strict=True)]
    nums = _num_in([ranks for _, ranks in ranked], sums.num_paths, np.zeros_like(stop), stop, below)
    nums[(limits[:, 1:] < 0).any(axis=1)] = 0
    return nums


def _num_in(ranks: list[Index], nums: Counts, start: Index, stop: Index, below: list[Any]) -> Counts:
    """Sum `nums` from start to stop for each query, over entries whose ranks are all below the query's bounds.

    At each bit of the first rank, entries with a 0 are moved before those with a 1. If the query's bound has a 1 there,
    the entries with a 0 are below it and those with a 1 may be; otherwise only those with a 0 may be.
    """
    if not ranks:
        cumulative_counts = np.concatenate([np.zeros(1, dtype=nums.dtype), np.cumsum(nums)])
        sums: Counts = cumulative_counts[stop] - cumulative_counts[start]
        return sums
    first, *others = ranks
    sums = np.zeros(len(start), dtype=nums.dtype)
    asked = np.arange(len(start))
    for level in reversed(range(int(first.max() + 1).bit_length() if len(first) else 0)):
        is_zero = (first >> level) & 1 == 0
        num_zeros = np.concatenate([[0], np.cumsum(is_zero)])
        order = np.concatenate([np.flatnonzero(is_zero), np.flatnonzero(~is_zero)])
        first, others, nums = first[order], [other[order] for other in others], nums[order]
        zeros = num_zeros[start], num_zeros[stop]
        is_one = (below[0][asked] >> level) & 1 == 1
        sure = np.flatnonzero(is_one & (zeros[0] < zeros[1]))
        if len(sure):
            further = [bound[asked[sure]] for bound in below[1:]]
            sums[asked[sure]] += _num_in(others, nums, zeros[0][sure], zeros[1][sure], further)
        start = np.where(is_one, num_zeros[-1] + start - zeros[0], zeros[0])
        stop = np.where(is_one, num_zeros[-1] + stop - zeros[1], zeros[1])
        left = np.flatnonzero(start < stop)
        start, stop, asked = start[left], stop[left], asked[left]
    return sums
