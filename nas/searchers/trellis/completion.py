"""How likely a training completes: logistic regression on a few counts, towards what usually happens."""

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from search_spaces.optima.stages import Floats

PRIOR_LOGIT = 3.0  # 19 of 20 complete
PRIOR_DEVIATION = 5.0  # of the weights of counts per layer, and of the logit


def completion_weights(counts: Floats, completed: Floats) -> Floats:
    """The most probable weights. counts: results x counts, the first of them 1; completed: 1 or 0."""
    centre = np.zeros(counts.shape[1])
    centre[0] = PRIOR_LOGIT
    signs = 2 * completed - 1

    def loss(weights: Floats) -> tuple[float, Floats]:
        apart, logits = weights - centre, signs * (counts @ weights)
        slope = apart / PRIOR_DEVIATION**2 - counts.T @ (signs * expit(-logits))
        return float(np.logaddexp(0, -logits).sum() + apart @ apart / 2 / PRIOR_DEVIATION**2), slope

    weights: Floats = minimize(loss, centre, jac=True).x
    return weights


def completion(counts: Floats, weights: Floats) -> Floats:
    """The probability that each completes."""
    likely: Floats = expit(counts @ weights)
    return likely
