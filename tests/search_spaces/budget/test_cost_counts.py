from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.budget import cost_counts
from search_spaces.budget.cost_counts import Sums, merged, num_at, num_within, nums_within, single

COSTS = st.tuples(st.integers(0, 9), st.integers(0, 9))
TABLES = st.dictionaries(COSTS, st.integers(1, 10**30), min_size=1, max_size=40)


def table(counts: dict[tuple[int, int], int]) -> Sums:
    return merged((single(cost), (0, 0), num) for cost, num in counts.items())


def as_dict(found: Sums) -> dict[tuple[int, int], int]:
    return {(int(a), int(b)): num for a, b, num in zip(found.latency, found.sent, found.num_paths, strict=True)}


@given(parts=st.lists(st.tuples(TABLES, COSTS, st.integers(1, 5)), min_size=1, max_size=4))
def test_merging_adds_up_equal_costs(parts: list[tuple[dict[tuple[int, int], int], tuple[int, int], int]]) -> None:
    expected: Counter[tuple[int, int]] = Counter()
    for counts, added, times in parts:
        for cost, num in counts.items():
            expected[cost[0] + added[0], cost[1] + added[1]] += num * times
    found = merged((table(counts), added, times) for counts, added, times in parts)
    assert as_dict(found) == expected
    assert list(as_dict(found)) == sorted(expected)


@given(counts=TABLES, limits=st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12)), max_size=20))
def test_counts_within_limits(counts: dict[tuple[int, int], int], limits: list[tuple[int, int]]) -> None:
    expected = [sum(num for cost, num in counts.items() if cost[0] <= a and cost[1] <= b) for a, b in limits]
    found = table(counts)
    assert [num_within(found, limit) for limit in limits] == expected
    latency, sent = np.array(limits, dtype=np.int64).reshape(-1, 2).T
    assert list(nums_within(found, latency, sent)) == expected
    assert [num_at(found, limit) for limit in limits] == [counts.get(limit, 0) for limit in limits]


def test_tables_too_large_are_refused() -> None:
    with (
        patch.object(cost_counts, "MAX_ROWS", 1),
        pytest.raises(ValueError, match="at most 1 distinct costs, but .* needs 2"),
    ):
        table({(0, 0): 1, (1, 1): 1})
