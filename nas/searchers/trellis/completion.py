"""How likely a training completes: logistic regression on a few counts, towards what usually happens.

Source: Bishop 2006, "Pattern Recognition and Machine Learning", section 4.3.3, for Newton's method.
"""

import numpy as np

from search_spaces.optima.stages import Floats

PRIOR_LOGIT = 3.0  # 19 of 20 complete
PRIOR_DEVIATION = 2.0  # of the weights of counts per layer, and of the logit
STEPS = 20  # of Newton's method, which needs fewer


def completion_weights(counts: Floats, completed: Floats) -> Floats:
    """The most probable weights. counts: results x counts, the first of them 1; completed: 1 or 0."""
    centre = np.zeros(counts.shape[1])
    centre[0] = PRIOR_LOGIT
    weights = centre.copy()
    precision = np.eye(len(weights)) / PRIOR_DEVIATION**2
    for _ in range(STEPS):
        likely = completion(counts, weights)
        slope = counts.T @ (completed - likely) - precision @ (weights - centre)
        curvature = (counts.T * (likely * (1 - likely))) @ counts + precision
        weights = weights + np.linalg.solve(curvature, slope)
    return weights


def completion(counts: Floats, weights: Floats) -> Floats:
    """The probability that each completes."""
    likely: Floats = 1 / (1 + np.exp(-(counts @ weights)))
    return likely
