"""Tables of how many paths have which cost, and the questions a budget asks of them; all counts are exact.

A cost is a pair of non-negative integers (latency and bytes, in whatever unit the caller has chosen). Counts take 64
bits as long as they fit, which half of 12 layers does, and are Python integers in object arrays beyond.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import UserError

Cost: TypeAlias = tuple[int, int]
Ints: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = NDArray[Any]  # of 64-bit integers, or of Python's

MAX_ROWS = 4_000_000
BATCH_ROWS = 1_000_000  # merged at a time: about 100 MB
MAX_COUNT = 2**62  # of all paths of a table in 64 bits


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Distinct costs in ascending order, first by latency, then by bytes; `num_paths[i]` paths have cost i."""

    latency: Ints
    sent: Ints
    num_paths: Counts

    @cached_property
    def cumulative_counts(self) -> Counts | None:
        """The paths of the first i costs, if none has bytes, as where only latency has a budget."""
        return None if self.sent.any() else np.concatenate([[0], np.cumsum(self.num_paths)])


def single(cost: Cost) -> Sums:
    """One path of the given cost."""
    return Sums(
        latency=np.array([cost[0]], dtype=np.int64),
        sent=np.array([cost[1]], dtype=np.int64),
        num_paths=np.array([1], dtype=np.int64),
    )


def merged(parts: Iterable[tuple[Sums, Cost, int]]) -> Sums:
    """The union of (sums, added cost, multiplicity): paths prolonged by alternatives of that cost and number.

    Raises UserError if the table would grow beyond MAX_ROWS.
    """
    whole, waiting, num_waiting = list[tuple[Sums, Cost, int]](), list[tuple[Sums, Cost, int]](), 0
    for part in parts:
        waiting.append(part)
        num_waiting += len(part[0].latency)
        if num_waiting > BATCH_ROWS:
            whole, waiting, num_waiting = [(_union([*whole, *waiting]), (0, 0), 1)], [], 0
    return _union([*whole, *waiting])


def _union(parts: list[tuple[Sums, Cost, int]]) -> Sums:
    num_paths = sum(int(sums.num_paths.sum()) * times for sums, _, times in parts)
    kind: Any = np.int64 if num_paths <= MAX_COUNT else object
    latency = np.concatenate([sums.latency + cost[0] for sums, cost, _ in parts])
    sent = np.concatenate([sums.sent + cost[1] for sums, cost, _ in parts])
    nums = np.concatenate([sums.num_paths.astype(kind) * times for sums, _, times in parts])
    order = np.lexsort((sent, latency))
    latency, sent, nums = latency[order], sent[order], nums[order]
    changes = (np.diff(latency) != 0) | (np.diff(sent) != 0)
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    if len(starts) > MAX_ROWS:
        raise UserError(
            f"the budget needs a table of at most {MAX_ROWS} distinct costs, but this space under this protocol needs "
            f"{len(starts)} or more; give one budget instead of two, or fewer choices per layer."
        )
    return Sums(latency=latency[starts], sent=sent[starts], num_paths=np.add.reduceat(nums, starts))


def num_at(sums: Sums, cost: Cost) -> int:
    """How many paths cost exactly this."""
    start, stop = sums.latency.searchsorted(cost[0]), sums.latency.searchsorted(cost[0], side="right")
    row = start + sums.sent[start:stop].searchsorted(cost[1])
    return int(sums.num_paths[row]) if row < stop and sums.sent[row] == cost[1] else 0


def num_within(sums: Sums, limit: Cost) -> int:
    """How many paths cost at most this, in latency and in bytes."""
    stop = sums.latency.searchsorted(limit[0], side="right")
    if limit[1] >= 0 and sums.cumulative_counts is not None:
        return int(sums.cumulative_counts[stop])
    return int(sums.num_paths[:stop][sums.sent[:stop] <= limit[1]].sum())


def num_between(sums: Sums, above: int, limit: Cost) -> int:
    """How many paths cost at most `limit`, and in latency more than `above`."""
    return num_within(sums, limit) - (num_within(sums, (above, limit[1])) if above >= 0 else 0)


def nums_within(sums: Sums, limit_latency: Ints, limit_sent: Ints) -> Counts:
    """`num_within` for many limits at once.

    The rows up to a limit's latency are split into blocks whose lengths are the powers of two of their number; in
    each block, sorted by bytes, one binary search counts. That takes O((rows + limits) log(rows)^2).
    """
    num_rows = len(sums.latency)
    num_below = np.searchsorted(sums.latency, limit_latency, side="right")
    values = np.unique(sums.sent)
    ranks = np.searchsorted(values, sums.sent)
    limit_ranks = np.searchsorted(values, limit_sent, side="right")
    nums = np.zeros(len(num_below), dtype=sums.num_paths.dtype)
    for level in range(num_rows.bit_length()):
        keys = (np.arange(num_rows) >> level) * len(values) + ranks
        order = np.argsort(keys, kind="stable")
        cumulative_counts = np.concatenate([[0], np.cumsum(sums.num_paths[order])])
        asked = np.flatnonzero((num_below >> level) & 1)
        block = (num_below[asked] >> level) - 1
        stops = np.searchsorted(keys[order], block * len(values) + limit_ranks[asked])
        nums[asked] += cumulative_counts[stops] - cumulative_counts[block << level]
    return nums
