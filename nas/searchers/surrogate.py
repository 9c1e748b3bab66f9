"""The surrogate of `trellis`: log-perplexity as a sum over sub-layers, by Bayesian linear regression.

The log-perplexity of a member is taken to be a sum over its sub-layers, of what each form is worth at its depth, and
of a few counts of the whole, by which losses grow as things run out: y = features @ weights + a discrepancy of each
member + noise of each seed, all normal. What forms of sub-layers are worth, and the discrepancy, are those of greatest
posterior probability on a grid; the rest is in closed form.

Prior means and deviations of counts and block scores are from least squares over the 16 placements of
`experiments/configs/fidelity.yaml`, which no benchmark of searchers uses, when linear FFNs did not start from the
parent's yet: 1.5 + 0.07 attention scores + 0.2 FFN scores + 0.7 / (1 + nonlinear FFNs) + 5.4 / (1 + attentions) left
0.05 nats of 0.40 (standard deviations). Of their present losses the prior leaves 0.16 of 0.34.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", sections 2.1, 5.4.1 and 5.4.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.sparse import csr_array

from nas.recipe.distillation import spread_layers
from nas.searchers.strategy import SearchProblem
from search_spaces.architecture import LIVE_NORMS, Layer
from search_spaces.deployed import LINEAR_FFNS
from search_spaces.notation import Member
from search_spaces.optima.stages import Floats, Index, Scores, Stages

SubLayerForm: TypeAlias = tuple[str, ...]  # norm and form of a sub-layer, of an FFN its stabiliser too

SMOOTHNESS = 3.0  # layers over which what a form is worth is alike
JITTER = 1e-9  # on the diagonal of a smooth covariance, so that it has a root
SEED_NOISE = 0.006  # nats: of one candidate, between seeds; experiments/data/fidelity.csv
WORTHS = (0.005, 0.01, 0.02, 0.05, 0.1)  # nats, of a sub-layer form at a depth
DISCREPANCIES = (0.01, 0.02, 0.05, 0.1, 0.2)  # nats, of a member
USUAL = (0.02, 0.05)  # what both are taken to be before there are results
PAIRS = tuple(product(WORTHS, DISCREPANCIES))
SPREAD = 1.0  # of the logarithms of both, around that


class Prior(NamedTuple):
    """Normal distribution of the weight of a feature."""

    mean: float
    deviation: float


BASE = Prior(2.0, 1.0)  # log-perplexity of a model of which nothing is scarce, from scratch
FROM_PARENT = 0.05  # deviation of that around the loss of a parent
LIVE_NORM = Prior(-0.005, 0.01)
REGULARISED = Prior(0.0, 0.05)
FIRST_FFN = Prior(
    0.0, 0.1
)  # of a nonlinear one in the first layer, beyond its block score, which is of another kind there
BLOCK_FACTORS = (Prior(0.1, 0.1), Prior(0.25, 0.2))  # of attention scores, of FFN scores
SCARCITY = (Prior(5.0, 1.5), Prior(0.7, 0.3))  # of 1 / (1 + attentions), of 1 / (1 + nonlinear FFNs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Features:
    """Made by `features_of`; layers are numbered as in `stages`.

    sub_layer_forms: by layer, the numbers of its two sub-layer forms. num_forms: of those.
    is_kept: by layer, 1 with attention, 1 with a nonlinear FFN. live_norms: by layer.
    base: log-perplexity of a model of which nothing is scarce.
    blocks: depth x layer x 2, ln(1 + score) of its halves, since what destroys a model heals the most; or None.
    """

    stages: Stages
    sub_layer_forms: Index
    num_forms: int
    is_kept: Floats
    live_norms: Floats
    base: Prior
    blocks: Floats | None
    from_parent: bool

    @property
    def num_sub_layer_weights(self) -> int:
        return self.num_forms * len(self.stages.steps)

    def rows(self, members: Sequence[Member]) -> Floats:
        """Members x features: forms by depth, base, live norms, regularised, first FFN, scarcity, block scores."""
        layers = self.stages.numbered([self._placed(member) for member in members])
        depths = np.arange(layers.shape[1])
        halves = np.zeros((len(members), self.num_sub_layer_weights))
        for half in range(2):
            places = self.sub_layer_forms[layers, half] * len(depths) + depths
            np.put_along_axis(halves, places, 1.0, axis=1)
        return np.column_stack(
            [
                halves,
                np.ones(len(members)),
                self.live_norms[layers].sum(axis=1),
                [float(member.entropy_regularised) for member in members],
                self.is_kept[layers[:, 0], 1],
                1 / (1 + self.is_kept[layers].sum(axis=1)),
                *([] if self.blocks is None else [self.blocks[depths, layers].sum(axis=1)]),
            ]
        )

    def _placed(self, member: Member) -> Sequence[Layer]:
        """Layers where they are trained: on which of the parent's."""
        layers = member.architecture.layers
        return spread_layers(layers) if self.from_parent else layers

    def prior(self, worth: float) -> tuple[Floats, Floats]:
        """Mean and covariance of the weights. worth: deviation of what a form is worth at a depth, in nats."""
        blocks = () if self.blocks is None else BLOCK_FACTORS
        others = [self.base, LIVE_NORM, REGULARISED, FIRST_FFN, *SCARCITY, *blocks]
        smooth = smooth_covariance(len(self.stages.steps), SMOOTHNESS)
        size = self.num_sub_layer_weights
        covariance = np.zeros((size + len(others), size + len(others)))
        covariance[:size, :size] = np.kron(np.eye(self.num_forms), worth**2 * smooth)
        covariance[range(size, len(covariance)), range(size, len(covariance))] = [
            prior.deviation**2 for prior in others
        ]
        return np.concatenate([np.zeros(size), [prior.mean for prior in others]]), covariance

    def additive(self, weights: Floats, kept: Sequence[float]) -> Scores:
        """Weights as scores that add up over layers, depth x layer.

        kept: how many attentions, and how many nonlinear FFNs, the member is taken to have: what one more is worth
        depends on that.
        """
        depths, size = np.arange(len(self.stages.steps)), self.num_sub_layer_weights
        _, live, _, first_ffn, *rest = weights[size:]
        scores: Scores = self.live_norms * live + np.zeros((len(depths), 1))
        scores[0] += self.is_kept[:, 1] * first_ffn
        for half in range(2):
            scores += weights[self.sub_layer_forms[:, half] * len(depths) + depths[:, None]]
            scores -= self.is_kept[:, half] * rest[half] / (1 + kept[half]) ** 2
            if self.blocks is not None:
                scores += self.blocks[:, :, half] * rest[2 + half]
        return scores


def features_of(stages: Stages, problem: SearchProblem) -> Features:
    """Makes the features of a problem's space."""
    halves = [sub_layer_forms(layer) for layer in stages.layers]
    numbers = {form: number for number, form in enumerate(dict.fromkeys(form for both in halves for form in both))}
    blocks = None
    if problem.blocks is not None and problem.parent is not None:
        blocks = np.log1p(np.moveaxis(problem.blocks.by_layer(stages, problem.parent), 0, 2))
    base = BASE
    if problem.parent_loss is not None:
        scarce = sum(prior.mean for prior in SCARCITY) / (1 + len(stages.steps))
        base = Prior(problem.parent_loss - scarce, FROM_PARENT)
    return Features(
        stages=stages,
        sub_layer_forms=np.array([[numbers[form] for form in both] for both in halves], dtype=np.intp),
        num_forms=len(numbers),
        is_kept=np.array([_is_kept(layer) for layer in stages.layers], dtype=float),
        live_norms=np.array([float(sum(norm in LIVE_NORMS for norm in _norms(layer))) for layer in stages.layers]),
        base=base,
        blocks=blocks,
        from_parent=problem.parent is not None,
    )


def smooth_covariance(num_depths: int, smoothness: float) -> Floats:
    """Depths x depths: what is alike over so many layers, of unit variance."""
    depths = np.arange(num_depths)
    covariance: Floats = np.exp(-(((depths[:, None] - depths) / smoothness) ** 2) / 2) + JITTER * np.eye(num_depths)
    return covariance


def sub_layer_forms(layer: Layer) -> tuple[SubLayerForm, SubLayerForm]:
    return ("attention", layer.norm1, layer.attention), ("ffn", layer.norm2, layer.ffn, layer.stabiliser)


def _is_kept(layer: Layer) -> tuple[bool, bool]:
    return layer.attention != "none", layer.ffn not in (*LINEAR_FFNS, "none")


def _norms(layer: Layer) -> tuple[str, str]:
    return layer.norm1, layer.norm2


class Posterior(NamedTuple):
    """Posterior distribution of the weights: mean, covariance and a root of it; and the discrepancy of a member."""

    mean: Floats
    covariance: Floats
    root: Floats
    discrepancy: float

    def predict(self, rows: Floats) -> "PredictiveDistribution":
        """For members with these features."""
        crossed = rows @ self.covariance
        return PredictiveDistribution(rows, rows @ self.mean, (crossed * rows).sum(axis=1), crossed, self.discrepancy)

    def draws(self, num: int, rng: np.random.Generator) -> Floats:
        """Weights drawn from the posterior, num x features."""
        drawn: Floats = self.mean + rng.normal(size=(num, len(self.mean))) @ self.root.T
        return drawn


class PredictiveDistribution(NamedTuple):
    """Log-perplexities of given members by a posterior, without discrepancy and the noise of a seed.

    rows: their features. mean, variance: of each. crossed: covariance with the weights, members x features.
    """

    rows: Floats
    mean: Floats
    variance: Floats
    crossed: Floats
    discrepancy: float

    @property
    def deviation(self) -> Floats:
        """Standard deviation of each, discrepancy included."""
        deviation: Floats = np.sqrt(self.variance + self.discrepancy**2)
        return deviation

    def condition_on(self, place: int) -> "PredictiveDistribution":
        """The distribution as it would be if this member came out as expected."""
        shared = self.rows @ self.crossed[place]
        gain = shared / (shared[place] + self.discrepancy**2 + SEED_NOISE**2)
        crossed = self.crossed - np.outer(gain, self.crossed[place])
        return self._replace(variance=self.variance - gain * shared, crossed=crossed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """losses: of each result. errors: of each, as all others predict it."""

    posterior: Posterior
    losses: Floats
    errors: Floats

    def r2(self, first: int = 0) -> float:
        """R^2 of the results from this one on: one minus their squared errors over those of their mean."""
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


def _posterior(mean: Floats, covariance: Floats, discrepancy: float) -> Posterior:
    values, vectors = np.linalg.eigh(covariance)  # some are next to 0, and less by rounding
    return Posterior(mean, covariance, vectors * np.sqrt(values.clip(min=0)), discrepancy)


def _log_posterior(
    features: Features, rows: Floats, same: Floats, losses: Floats, worth: float, discrepancy: float
) -> float:
    mean, covariance = features.prior(worth)
    kernel = rows @ covariance @ rows.T + discrepancy**2 * same + SEED_NOISE**2 * np.eye(len(losses))
    factor, lower = cho_factor(kernel)
    apart = losses - rows @ mean
    likelihood = -apart @ cho_solve((factor, lower), apart) / 2 - np.log(factor.diagonal()).sum()
    return float(likelihood + _log_prior(worth, discrepancy))


def _log_prior(worth: float, discrepancy: float) -> float:
    apart = sum(float(np.log(value / usual)) ** 2 for value, usual in zip((worth, discrepancy), USUAL, strict=True))
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
    whitened: tuple[Floats, Floats], crossed: Floats, apart: Floats, worth: float, discrepancy: float
) -> float:
    (root, inner), noise = whitened, discrepancy**2 + SEED_NOISE**2
    factor, lower = cho_factor(inner / noise + np.eye(len(root)))
    seen = root.T @ crossed
    squares = (apart @ apart - seen @ cho_solve((factor, lower), seen) / noise) / noise
    log_determinant = len(apart) * np.log(noise) / 2 + np.log(factor.diagonal()).sum()
    return float(-squares / 2 - log_determinant + _log_prior(worth, discrepancy))


def _whitened(features: Features, gram: Floats) -> dict[float, tuple[Floats, Floats]]:
    """A root of the weights' covariance, and the gram matrix of features in its terms, by what forms are worth.

    Only the weights of sub-layer forms scale with that.
    """
    root = np.linalg.cholesky(features.prior(1.0)[1])
    inner, is_sub_layer = root.T @ gram @ root, np.arange(len(root)) < features.num_sub_layer_weights
    scales = {worth: np.where(is_sub_layer, worth, 1.0) for worth in WORTHS}
    return {worth: (root * scale, scale[:, None] * inner * scale) for worth, scale in scales.items()}
