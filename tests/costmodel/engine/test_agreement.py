import numpy as np
import pytest

from costmodel.engine.agreement import compared, joined, wilson


def test_wilsons_interval_is_the_root_of_its_equation():
    """Ends p of the interval solve (p - share)^2 = z^2 p (1 - p) / n, with z = 1.959964."""
    for successes, trials in ((99, 100), (1, 7), (2045, 2048), (512, 512)):
        for end in wilson(successes, trials):
            assert (end - successes / trials) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / trials, rel=1e-5)


def test_agreement_counts_positions_and_takes_the_largest_error():
    clear = np.array([[0.0, 1.0, 0.5], [2.0, 0.0, 0.0]])
    private = np.array([[0.0, 1.1, 0.5], [0.0, 0.3, 0.0]])
    agreement = compared(private, clear)
    assert (agreement.num_positions, agreement.num_equal, agreement.largest_error) == (2, 1, 2.0)
    both = joined([agreement, compared(clear[:1], clear[:1])])
    assert (both.num_positions, both.num_equal, both.largest_error) == (3, 2, 2.0)
    assert both.top1 == pytest.approx(2 / 3)
