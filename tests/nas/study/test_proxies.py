import numpy as np
import pytest

from nas.searchers.strategy import Observation
from nas.study.proxies import FROM_PARENT, losses_after_proxies
from search_spaces.bases import BASES
from search_spaces.notation import parse

MEMBER = parse("SM+LN+G", BASES["tiny"])


def look(loss: float) -> Observation:
    return Observation(member=MEMBER, status="paused", latency_s=1.0, log_perplexity=None, rung_losses=(loss,))


def end(at_rung: float, at_end: float) -> Observation:
    return Observation(member=MEMBER, latency_s=1.0, log_perplexity=at_end, rung_losses=(at_rung, at_end))


def test_without_results_the_prior_says_it():
    (known, expected) = losses_after_proxies([end(2.5, 2.1), look(2.5)][1:] * 2, 1.9)
    assert known == expected
    assert known.mean == pytest.approx(1.9 + FROM_PARENT.mean[0] + FROM_PARENT.mean[1] * 0.6)
    variance = FROM_PARENT.deviation[0] ** 2 + (0.6 * FROM_PARENT.deviation[1]) ** 2 + FROM_PARENT.around**2
    assert known.deviation == pytest.approx(variance**0.5)


def test_it_is_the_normal_distribution_given_the_results():
    """By the block formula for conditional normals."""
    pairs = np.array([(2.4, 2.2), (2.9, 2.5), (3.3, 2.6)])
    terms = np.column_stack([np.ones(4), [*(pairs[:, 0] - 1.9), 2.6 - 1.9]])
    joint = terms @ np.diag(np.square(FROM_PARENT.deviation)) @ terms.T + FROM_PARENT.around**2 * np.eye(4)
    mean = terms @ FROM_PARENT.mean + 1.9
    gain = joint[3, :3] @ np.linalg.inv(joint[:3, :3])
    expected = losses_after_proxies([*(end(*pair) for pair in pairs), look(2.6)], 1.9)[-1]
    assert expected.mean == pytest.approx(mean[3] + gain @ (pairs[:, 1] - mean[:3]))
    assert expected.deviation**2 == pytest.approx(joint[3, 3] - gain @ joint[:3, 3])


def test_from_scratch_the_best_look_is_what_others_are_measured_by():
    best, other = losses_after_proxies([look(4.0), look(5.0)], None)
    assert best.mean < other.mean
    assert best.deviation > losses_after_proxies([look(4.0)], 4.0)[0].deviation


def test_what_failed_has_no_end():
    failed = Observation(member=MEMBER, status="failed", latency_s=1.0, log_perplexity=None)
    assert losses_after_proxies([failed], 1.9) == [None]
