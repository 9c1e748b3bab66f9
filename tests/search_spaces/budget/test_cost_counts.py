from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.budget import cost_counts
from search_spaces.budget.cost_counts import (
    Cost,
    Sums,
    Way,
    added,
    num_at,
    num_within,
    nums_within,
    prolonged,
    single,
)

NUM_MEASURES = st.shared(st.integers(1, 3), key="measures")
COSTS = NUM_MEASURES.flatmap(lambda num: st.tuples(*[st.integers(0, 9)] * num))
LIMITS = NUM_MEASURES.flatmap(lambda num: st.tuples(*[st.integers(-2, 12)] * num))
TABLES = st.dictionaries(COSTS, st.integers(1, 10**30), min_size=1, max_size=40)


def table(counts: dict[Cost, int]) -> Sums:
    free = (0,) * len(next(iter(counts)))
    return prolonged({0: single(free)}, [Way(0, 1, cost, num) for cost, num in counts.items()])[1]


def as_dict(found: Sums) -> dict[Cost, int]:
    return {tuple(cost): num for cost, num in zip(found.costs.tolist(), found.num_paths, strict=True)}


@given(parts=st.lists(st.tuples(TABLES, COSTS, st.integers(1, 5), st.integers(0, 1)), min_size=1, max_size=4))
def test_merging_adds_up_equal_costs(parts: list[tuple[dict[Cost, int], Cost, int, int]]) -> None:
    expected: dict[int, Counter[Cost]] = {stop: Counter() for *_, stop in parts}
    for counts, further, times, stop in parts:
        for cost, num in counts.items():
            expected[stop][added([cost, further])] += num * times
    ways = [Way(start, stop, further, times) for start, (_, further, times, stop) in enumerate(parts)]
    found = prolonged({start: table(counts) for start, (counts, *_) in enumerate(parts)}, ways)
    assert {stop: as_dict(sums) for stop, sums in found.items()} == expected
    assert all(list(as_dict(sums)) == sorted(expected[stop]) for stop, sums in found.items())


def test_two_costs_that_share_a_number_are_told_apart() -> None:
    """By odd numbers 1 and 1, (1, 2) and (2, 1) would be one cost; the next ones tell them apart."""
    odd = [np.array([1, 1]), np.array([1, 3])]
    with patch.object(cost_counts, "_odd_numbers", return_value=odd):
        assert as_dict(table({(1, 2): 5, (2, 1): 7})) == {(1, 2): 5, (2, 1): 7}


@given(counts=TABLES, limits=st.lists(LIMITS, max_size=20))
def test_counts_within_limits(counts: dict[Cost, int], limits: list[Cost]) -> None:
    def is_within(cost: Cost, limit: Cost) -> bool:
        return all(part <= most for part, most in zip(cost, limit, strict=True))

    expected = [sum(num for cost, num in counts.items() if is_within(cost, limit)) for limit in limits]
    found = table(counts)
    assert [num_within(found, limit) for limit in limits] == expected
    asked = np.array(limits, dtype=np.int64).reshape(-1, found.costs.shape[1])
    assert list(nums_within(found, asked)) == expected
    assert [num_at(found, limit) for limit in limits] == [counts.get(limit, 0) for limit in limits]


def test_tables_too_large_are_refused() -> None:
    with (
        patch.object(cost_counts, "MAX_ROWS", 1),
        pytest.raises(ValueError, match="at most 1 distinct costs, but .* needs 2"),
    ):
        table({(0, 0): 1, (1, 1): 1})
