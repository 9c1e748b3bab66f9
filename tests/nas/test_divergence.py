"""The rule for a loss above its start."""

from nas.divergence import WINDOW, above_start


def test_a_run_above_its_start_is_recognised_only_after_a_full_window() -> None:
    assert above_start([3.0] * WINDOW, 2.9)
    assert not above_start([3.0] * (WINDOW - 1), 2.9)


def test_a_loss_at_its_start_or_a_spike_is_no_divergence() -> None:
    assert not above_start([3.0] * WINDOW, 3.0)
    assert not above_start([2.0] * (WINDOW - 1) + [90.0], 2.9)
    assert not above_start([9.0] * (WINDOW - 1) + [2.0], 2.9)


def test_only_the_last_window_counts() -> None:
    assert above_start([0.1, *[3.0] * WINDOW], 2.9)
