"""Sums over pairs of costs within limits equal those of comparing every pair."""

import numpy as np
import pytest

from search_spaces.budget.together import sums_together


@pytest.mark.parametrize("measures", [1, 2, 4, 7])
@pytest.mark.parametrize(("num", "num_others"), [(0, 3), (1, 1), (3, 2000), (2000, 3), (700, 1500)])
def test_sums_are_those_of_every_pair_within_the_limits(num: int, num_others: int, measures: int) -> None:
    rng = np.random.default_rng(num + measures)
    trend = [rng.integers(2**45, size=(count, 1)) for count in (num, num_others)]
    costs, others = (  # which rise together, but for the last, which falls and is below 0, and have equals
        (rise // 2**37 + rng.integers(50, size=(len(rise), measures))) * np.append(np.ones(measures - 1, int), -1)
        for rise in trend
    )
    weights = rng.integers(2**40, size=(3, num_others))
    limit = tuple(map(int, np.append(np.full(measures - 1, 250), -180)))
    is_within = (costs[:, None] + others <= limit).all(axis=2)
    sums = sums_together(costs, others, limit, weights)
    assert sums is not None
    assert sums.T.tolist() == (is_within @ weights.T).tolist()
    assert measures in (1, 7) or num * num_others < 10**6 or 0 < is_within.mean() < 1
    assert num < 100 or num_others < 100 or measures == 1 or sums_together(costs, others, limit, weights, 10**5) is None
