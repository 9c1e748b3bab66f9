import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.cost import Budget, Price, total_price

SECONDS = st.integers(0, 10**6).map(float)


@given(st.lists(st.tuples(SECONDS, SECONDS, st.none() | st.integers(0, 99)), min_size=1))
def test_totals_are_sums_and_unknown_parts_make_them_unknown(parts):
    whole = total_price(Price(latency_s=a, sent_bytes=b, rounds=c) for a, b, c in parts)
    assert whole.latency_s == sum(a for a, _, _ in parts)
    assert whole.sent_bytes == sum(b for _, b, _ in parts)
    rounds = [c for _, _, c in parts]
    assert whole.rounds == (None if None in rounds else sum(rounds))
    assert whole.messages is None


def test_a_total_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one price"):
        total_price([])


def test_budgets_admit_up_to_their_bounds():
    price = Price(latency_s=300.0, sent_bytes=8e9)
    assert Budget().admits(price)
    assert Budget(latency_s=300.0, sent_bytes=8e9).admits(price)
    assert not Budget(latency_s=299.0).admits(price)
    assert not Budget(latency_s=300.0, sent_bytes=7e9).admits(price)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_bounds_are_refused(bound):
    with pytest.raises(ValueError, match="budget `latency_s` must be positive and finite"):
        Budget(latency_s=bound)
