import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.run.pareto import dominates, hypervolume, knee, nondominated, ranks

POINTS = st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), max_size=12)


@given(POINTS)
def test_nondominated_is_the_definition(points):
    expected = [not any(dominates(other, point) for other in points) for point in points]
    assert nondominated(points) == expected
    assert [rank == 0 for rank in ranks(points)] == expected


def test_hypervolume_by_hand():
    # (10 - 2) x (5 - 3) for the first, plus (10 - 4) x (3 - 1) for the second; nothing for what is beyond
    assert hypervolume([(2.0, 3.0), (4.0, 1.0), (11.0, 1.0), (1.0, 6.0)], (10.0, 5.0)) == 8 * 2 + 6 * 2
    assert hypervolume([], (10.0, 5.0)) == 0


def test_knee_bends_most_and_of_a_short_front_is_the_lowest_perplexity():
    assert knee([(0.0, 10.0), (1.0, 2.0), (10.0, 0.0), (5.0, 9.0)]) == 1
    assert knee([(1.0, 5.0), (2.0, 4.0)]) == 1
    with pytest.raises(ValueError, match="at least one point"):
        knee([])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_trial_is_never_a_point(bad):
    for function in (nondominated, ranks, knee):
        with pytest.raises(ValueError, match="finite"):
            function([(1.0, bad), (2.0, 1.0)])
