"""Bayesian linear regression of log-perplexity on the features of `trellis`, and how far it can be trusted.

y = features @ weights + a misfit of each member + noise of each seed, all normal. What half forms are worth, and the
misfit, are those of greatest posterior probability on a grid; the rest is in closed form.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", sections 2.1, 5.4.1 and 5.4.2.
"""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.sparse import csr_array

from nas.searchers.trellis.features import Features
from search_spaces.optima.stages import Floats

SEED_NOISE = 0.006  # nats: of one candidate, between seeds; experiments/data/fidelity.csv
WORTHS = (0.005, 0.01, 0.02, 0.05, 0.1)  # nats, of a half form at a depth
MISFITS = (0.01, 0.02, 0.05, 0.1, 0.2)  # nats, of a member
USUAL = (0.02, 0.05)  # what both are taken to be before there are results
PAIRS = tuple(product(WORTHS, MISFITS))
SPREAD = 1.0  # of the logarithms of both, around that


class Posterior(NamedTuple):
    """Of the weights: mean, covariance and a root of it; and the misfit of a member."""

    mean: Floats
    covariance: Floats
    root: Floats
    misfit: float

    def outlook(self, rows: Floats) -> "Outlook":
        """For members with these features."""
        crossed = rows @ self.covariance
        return Outlook(rows, rows @ self.mean, (crossed * rows).sum(axis=1), crossed, self.misfit)

    def draws(self, num: int, rng: np.random.Generator) -> Floats:
        """Weights drawn from the posterior, num x features."""
        drawn: Floats = self.mean + rng.normal(size=(num, len(self.mean))) @ self.root.T
        return drawn


class Outlook(NamedTuple):
    """What a posterior says of the log-perplexities of given members, without misfit and the noise of a seed.

    rows: their features. mean, variance: of each. crossed: covariance with the weights, members x features.
    """

    rows: Floats
    mean: Floats
    variance: Floats
    crossed: Floats
    misfit: float

    @property
    def deviation(self) -> Floats:
        """Of each, misfit included."""
        deviation: Floats = np.sqrt(self.variance + self.misfit**2)
        return deviation

    def given(self, place: int) -> "Outlook":
        """As it would be if this member came out as expected."""
        shared = self.rows @ self.crossed[place]
        gain = shared / (shared[place] + self.misfit**2 + SEED_NOISE**2)
        crossed = self.crossed - np.outer(gain, self.crossed[place])
        return self._replace(variance=self.variance - gain * shared, crossed=crossed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """losses: of each result. errors: of each, as all others predict it."""

    posterior: Posterior
    losses: Floats
    errors: Floats

    def r2(self, first: int = 0) -> float:
        """Of the results from this one on: one minus their squared errors over those of their mean."""
        errors, losses = self.errors[first:], self.losses[first:]
        around = losses - losses.mean()
        return float(1 - errors @ errors / max(around @ around, 1e-12))


def fit(features: Features, rows: Floats, members: list[int], losses: Floats) -> Fit:
    """rows: of each result, its features. members: numbers that are equal for results of one member."""
    if not len(losses):
        mean, covariance = features.prior(USUAL[0])
        return Fit(posterior=_posterior(mean, covariance, USUAL[1]), losses=losses, errors=losses)
    if len(losses) > rows.shape[1] and len(set(members)) == len(members):
        return _fit_of_many(features, rows, losses)
    same = np.equal.outer(members, members).astype(float)
    best = max(PAIRS, key=lambda pair: _log_posterior(features, rows, same, losses, *pair))
    mean, covariance = features.prior(best[0])
    crossed = covariance @ rows.T  # features x results
    factor = cho_factor(rows @ crossed + best[1] ** 2 * same + SEED_NOISE**2 * np.eye(len(losses)))
    solved = cho_solve(factor, losses - rows @ mean)
    posterior = _posterior(mean + crossed @ solved, covariance - crossed @ cho_solve(factor, crossed.T), best[1])
    inverse = cho_solve(factor, np.eye(len(losses)))
    return Fit(posterior=posterior, losses=losses, errors=solved / inverse.diagonal())


def _posterior(mean: Floats, covariance: Floats, misfit: float) -> Posterior:
    values, vectors = np.linalg.eigh(covariance)  # some are next to 0, and less by rounding
    return Posterior(mean, covariance, vectors * np.sqrt(values.clip(min=0)), misfit)


def _log_posterior(
    features: Features, rows: Floats, same: Floats, losses: Floats, worth: float, misfit: float
) -> float:
    mean, covariance = features.prior(worth)
    kernel = rows @ covariance @ rows.T + misfit**2 * same + SEED_NOISE**2 * np.eye(len(losses))
    factor, lower = cho_factor(kernel)
    apart = losses - rows @ mean
    likelihood = -apart @ cho_solve((factor, lower), apart) / 2 - np.log(factor.diagonal()).sum()
    return float(likelihood + _log_prior(worth, misfit))


def _log_prior(worth: float, misfit: float) -> float:
    apart = sum(float(np.log(one / usual)) ** 2 for one, usual in zip((worth, misfit), USUAL, strict=True))
    return -apart / 2 / SPREAD**2


def _fit_of_many(features: Features, rows: Floats, losses: Floats) -> Fit:
    """The same where there are more results than features, all of different members: by features, not by results.

    Weights are mean + root @ (standard normal ones); the precision of those is inner / noise + 1.
    """
    mean, _ = features.prior(USUAL[0])
    apart, sparse = losses - rows @ mean, csr_array(rows)
    gram, crossed = (sparse.T @ sparse).toarray(), rows.T @ apart
    whitened = _whitened(features, gram)
    best = max(PAIRS, key=lambda pair: _log_posterior_of_many(whitened[pair[0]], crossed, apart, *pair))
    (root, inner), noise = whitened[best[0]], best[1] ** 2 + SEED_NOISE**2
    root = solve_triangular(np.linalg.cholesky(inner / noise + np.eye(len(root))), root.T, lower=True).T
    covariance = root @ root.T
    weights = covariance @ crossed / noise
    solved = (apart - rows @ weights) / noise
    left = (1 - np.einsum("ij,ij->i", sparse @ covariance, rows) / noise) / noise  # the kernel's inverse's diagonal
    return Fit(posterior=Posterior(mean + weights, covariance, root, best[1]), losses=losses, errors=solved / left)


def _log_posterior_of_many(
    whitened: tuple[Floats, Floats], crossed: Floats, apart: Floats, worth: float, misfit: float
) -> float:
    (root, inner), noise = whitened, misfit**2 + SEED_NOISE**2
    factor, lower = cho_factor(inner / noise + np.eye(len(root)))
    seen = root.T @ crossed
    squares = (apart @ apart - seen @ cho_solve((factor, lower), seen) / noise) / noise
    log_determinant = len(apart) * np.log(noise) / 2 + np.log(factor.diagonal()).sum()
    return float(-squares / 2 - log_determinant + _log_prior(worth, misfit))


def _whitened(features: Features, gram: Floats) -> dict[float, tuple[Floats, Floats]]:
    """By what half forms are worth: a root of the weights' covariance, and the gram matrix of features in its terms.

    Only the weights of half forms scale with that.
    """
    root = np.linalg.cholesky(features.prior(1.0)[1])
    inner, is_half = root.T @ gram @ root, np.arange(len(root)) < features.num_half_weights
    scales = {worth: np.where(is_half, worth, 1.0) for worth in WORTHS}
    return {worth: (root * scale, scale[:, None] * inner * scale) for worth, scale in scales.items()}
