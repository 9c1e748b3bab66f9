from unittest.mock import patch

import numpy as np
import pytest

from search_spaces.budget import cost_counts
from search_spaces.budget.cost_counts import (
    Cost,
    Sums,
    Way,
    prolonged,
    single,
)


def table(counts: dict[Cost, int]) -> Sums:
    free = (0,) * len(next(iter(counts)))
    return prolonged({0: single(free)}, [Way(0, 1, cost, num) for cost, num in counts.items()])[1]


def as_dict(sums: Sums) -> dict[Cost, int]:
    return {tuple(cost): num for cost, num in zip(sums.costs.tolist(), sums.num_paths, strict=True)}


def test_two_costs_that_share_a_number_are_told_apart():
    """By odd numbers 1 and 1, (1, 2) and (2, 1) would be one cost; the next ones tell them apart."""
    odd = [np.array([1, 1]), np.array([1, 3])]
    with patch.object(cost_counts, "_odd_numbers", return_value=odd):
        assert as_dict(table({(1, 2): 5, (2, 1): 7})) == {(1, 2): 5, (2, 1): 7}


def test_tables_too_large_are_refused():
    with (
        patch.object(cost_counts, "MAX_ROWS", 1),
        pytest.raises(ValueError, match="at most 1 distinct costs, but .* needs 2"),
    ):
        table({(0, 0): 1, (1, 1): 1})
