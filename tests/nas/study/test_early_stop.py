"""A rung stops a trial only where it is shown to predict the end, and by more than it has been wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from nas.study.early_stop import MIN_CORRELATION, dominated_at_rung, expected_ends, spearman, widest_swap
from nas.study.finalists import Result


def rivals(at_rung, at_end, latency_s=10.0) -> list[Result]:
    return [
        Result(index=index, status="completed", latency_s=latency_s, log_perplexity=end, rung_losses=(rung, end))
        for index, (rung, end) in enumerate(zip(at_rung, at_end, strict=True))
    ]


AGREEING = rivals([4.0 + index / 10 for index in range(8)], [3.0 + index / 10 for index in range(8)])
# 0 and 2 change places: a lead of 0.2 at the rung is lost; 6 of 8 ranks stay: 1 - 6 * 8 / (8 * 63) = 0.905
SWAPPED = rivals([4.0 + index / 10 for index in range(8)], [3.2, 3.1, 3.0, *(3.3 + index / 10 for index in range(5))])


def test_a_trial_is_dominated_only_in_price_and_loss():
    assert dominated_at_rung(0, 11.0, 4.01, AGREEING)
    assert dominated_at_rung(0, 10.0, 4.01, AGREEING)
    assert not dominated_at_rung(0, 9.0, 9.0, AGREEING)  # cheaper: survives whatever its loss
    assert not dominated_at_rung(0, 11.0, 4.0, AGREEING)  # equal
    assert not dominated_at_rung(2, 11.0, 9.0, AGREEING)  # the rivals never reached that rung


def test_seven_completed_trials_show_nothing():
    assert not dominated_at_rung(0, 11.0, 9.0, AGREEING[:7])
    failed = Result(index=9, status="stopped", latency_s=1.0, log_perplexity=None, rung_losses=(0.1,))
    assert not dominated_at_rung(0, 11.0, 9.0, [*AGREEING[:7], failed])


def test_what_still_changes_places_is_a_margin():
    assert spearman([one.rung_losses[0] for one in SWAPPED], [one.rung_losses[1] for one in SWAPPED]) > MIN_CORRELATION
    assert not dominated_at_rung(0, 11.0, 4.19, SWAPPED)
    assert dominated_at_rung(0, 11.0, 4.21, SWAPPED)


def test_a_rung_that_orders_otherwise_than_the_end_stops_nothing():
    shuffled = rivals(range(8), [1.0, 0.0, 3.0, 2.0, 5.0, 4.0, 7.0, 6.0])  # 1 - 6 * 8 / (8 * 63) = 0.905
    assert dominated_at_rung(0, 11.0, 99.0, shuffled)
    reversed_ends = rivals(range(8), [3.0, 2.0, 1.0, 0.0, 4.0, 5.0, 6.0, 7.0])  # 1 - 6 * 20 / (8 * 63) = 0.76
    assert not dominated_at_rung(0, 11.0, 99.0, reversed_ends)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_rank_correlation_is_scipys(pairs):
    one, other = zip(*pairs, strict=True)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert spearman(one, other) == 0
    else:
        assert spearman(one, other) == pytest.approx(spearmanr(one, other).statistic)


def test_the_widest_swap_by_hand():
    assert widest_swap([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 0
    assert widest_swap([1.0, 2.0, 4.0], [2.0, 3.0, 1.0]) == 3.0  # the first led the last by 3 and ended behind it
    assert widest_swap(list(np.zeros(3)), [1.0, 2.0, 3.0]) == 0


def stopped(*rung_losses: float) -> Result:
    return Result(index=99, status="stopped", latency_s=11.0, log_perplexity=None, rung_losses=rung_losses)


def test_a_stopped_trial_is_expected_to_end_as_others_did():
    halving = rivals([4.0 + index for index in range(8)], [3.0 + index / 2 for index in range(8)])
    ends = expected_ends([*halving, stopped(13.0)])
    assert ends[:8] == [one.log_perplexity for one in halving]
    assert ends[8] == pytest.approx(3 + (13 - 4) / 2)


def test_too_few_say_nothing_of_a_stopped_trial_and_equal_ones_their_mean():
    assert expected_ends([*AGREEING[:7], stopped(5.0)])[7] is None
    assert expected_ends([*rivals([4.0] * 8, range(8)), stopped(5.0)])[8] == pytest.approx(3.5)
    failed = Result(index=9, status="failed", latency_s=1.0, log_perplexity=None, rung_losses=(4.0,))
    assert expected_ends([*AGREEING, failed])[8] is None
