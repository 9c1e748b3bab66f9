import math

import pytest

from experiments.ranking import pairs_in_order, spearman

PRINTED = {"a": 1.0, "b": 2.0, "c": 3.0, "d": math.inf}


@pytest.mark.parametrize(
    ("first", "second", "correlation"),
    [
        ({"a": 1.0, "b": 2.0, "c": 3.0}, {"c": 5.0, "a": 4.0, "b": 6.0}, 0.5),  # 1 - 6 * (0 + 1 + 1) / (3 * 8)
        (PRINTED, {"a": 1.0, "b": 2.0, "c": 3.0, "d": math.inf}, 1.0),  # a divergence ranks last
        (PRINTED, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, 1.0),
        ({"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 5.0}, math.nan),
    ],
)
def test_spearman(first, second, correlation):
    assert spearman(first, second) == pytest.approx(correlation, nan_ok=True)


def test_ties_in_print_are_no_pairs():
    assert pairs_in_order({"a": 1.0, "b": 1.0, "c": 2.0}, {"a": 5.0, "b": 6.0, "c": 5.5}) == (1, 2)
