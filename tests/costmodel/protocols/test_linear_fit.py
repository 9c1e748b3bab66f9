import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.protocols.linear_fit import extremes, fit

ROWS = [{"a": 1_000_000, "b": 3}, {"a": 2_000_000, "b": 1}, {"a": 500_000, "b": 7}]


@given(a=st.floats(1e-9, 1e3), b=st.floats(1.0, 1e9))
def test_exact_coefficients_are_found_whatever_their_scale(a, b):
    targets = [a * row["a"] + b * row["b"] for row in ROWS]
    coefficients = fit(ROWS, targets, worst=0.0, fixed={})
    assert [sum(coefficients[term] * row[term] for term in row) for row in ROWS] == pytest.approx(targets, rel=1e-5)


def test_the_cap_on_the_worst_error_is_kept_and_the_mean_is_least_under_it():
    # One coefficient, counts 1, targets 100, 100, 110: the median 100 errs by 0, 0 and 10/110 = 9.1 %.
    rows, targets = [{"a": 1}] * 3, [100.0, 100.0, 110.0]
    assert fit(rows, targets, worst=0.2, fixed={})["a"] == pytest.approx(100)
    # Under a cap of 6 % the third row needs at least 110 * 0.94 = 103.4, and not more.
    assert fit(rows, targets, worst=0.06, fixed={})["a"] == pytest.approx(103.4)
    # A cap of 1 % is out of reach: equal relative errors at 2 * 100 * 110 / 210, an error of 10 / 210.
    assert fit(rows, targets, worst=0.01, fixed={})["a"] == pytest.approx(2 * 100 * 110 / 210)


def test_rows_without_a_cap_count_in_the_mean_alone():
    # The first row must stay within 1 %; the median of 100, 150, 150 is out of its reach.
    rows, targets = [{"a": 1}] * 3, [100.0, 150.0, 150.0]
    assert fit(rows, targets, worst=0.01, fixed={}, capped=[True, False, False])["a"] == pytest.approx(101)
    # A term that only a row without a cap has is fitted by that row.
    coefficients = fit([{"a": 1, "b": 0}, {"a": 1, "b": 1}], [5.0, 8.0], worst=0.0, fixed={}, capped=[True, False])
    assert coefficients == {"a": pytest.approx(5), "b": pytest.approx(3)}


def test_given_coefficients_stay_as_they_are_and_none_is_negative():
    targets = [5.0 * row["a"] + 2.0 * row["b"] for row in ROWS]
    assert fit(ROWS, targets, worst=0.0, fixed={"b": 2.0}) == {"b": 2.0, "a": pytest.approx(5.0)}
    assert fit([{"a": 1, "b": 1}, {"a": 1, "b": 2}], [10.0, 1.0], worst=0.0, fixed={})["b"] == 0.0


def test_extremes_by_hand():
    # a in [9, 11] from the row; 2 a in [18, 22].
    assert extremes({"a": 2}, [{"a": 1}], [10.0], 0.1, {}) == pytest.approx((18.0, 22.0))
    # a + b in [9, 11] with b in [1, 2] leaves a in [7, 10].
    low, high = extremes({"a": 1, "b": 0}, [{"a": 1, "b": 1}], [10.0], 0.1, {"b": (1.0, 2.0)})
    assert (low, high) == pytest.approx((7.0, 10.0))
    assert extremes({"a": 1, "b": 1}, [{"a": 1, "b": 0}], [10.0], 0.1, {})[1] == math.inf


def test_rows_that_contradict_each_other_are_an_error():
    with pytest.raises(ValueError, match=r"no coefficients reproduce every row within 1\.0%"):
        extremes({"a": 1}, [{"a": 1}, {"a": 1}], [10.0, 20.0], 0.01, {})
