"""The surrogate of `trellis`: log-perplexity as a sum over sub-layers, by Bayesian linear regression.

The log-perplexity of a member is taken to be a sum over its sub-layers, of what each form is worth at its depth, and
of a few counts of the whole, by which losses grow as things run out: y = features @ weights + a discrepancy of each
member + noise of each seed, all normal. What forms of sub-layers are worth, and the discrepancy, are those of greatest
posterior probability on a grid; the rest is in closed form.

What the whole lacks is ln((1 + layers) / (1 + nonlinear FFNs)), the same of attentions, of which one with half of the
heads is half of one, and gaps: of all pairs of layers, the share with no attention from the first to the second, since
tokens then hear nothing of one another on the way. Prior means, all relative to the parent, are from least squares over
four parents: `python -m experiments run prior` prints that fit, those without each of the four, and what they explain
of parents that are in none. Attention scores add nothing to gaps, and have a weight near 0.

Source: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", sections 2.1, 5.4.1 and 5.4.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import comb
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag, solve_triangular
from scipy.sparse import csr_array

from nas.recipe.distillation import spread_layers
from nas.searchers.strategy import SearchProblem
from search_spaces.architecture import Layer
from search_spaces.forms import LINEAR_FFNS, LIVE_NORMS
from search_spaces.notation import Member
from search_spaces.optima.stages import Floats, Index, Scores, Stages

Bools: TypeAlias = NDArray[np.bool_]
SubLayerForm: TypeAlias = tuple[str, ...]  # norm and form of a sub-layer, of an FFN its stabiliser too

SMOOTHNESS = 3.0  # layers over which what a form is worth is alike
JITTER = 1e-9  # on the diagonal of a smooth covariance, so that it has a root
SEED_NOISE = 0.006  # nats: of one candidate, between seeds; experiments/data/fidelity.csv
WORTHS = (0.005, 0.01, 0.02, 0.05, 0.1)  # nats, of a sub-layer form at a depth
DISCREPANCIES = (0.01, 0.02, 0.05, 0.1, 0.2)  # nats, of a member
USUAL = (0.02, 0.05)  # what both are taken to be before there are results
PAIRS = tuple(product(WORTHS, DISCREPANCIES))
SHORT_UNIT = 0.1  # of WORTHS where little heals: scores are then of what candidates start as, most below 0.003 nats
HEADS = {"none": 0.0, "softmax-half": 0.5}  # share of a layer's; all of other forms
NUM_COUNTS = 7  # features that are no form of a sub-layer and no block score
SPREAD = 1.0  # of the logarithms of both, around that


class Prior(NamedTuple):
    """Normal distribution of the weight of a feature."""

    mean: float
    deviation: float


BASE = Prior(2.4, 1.0)  # log-perplexity of a model of which nothing is scarce, from scratch
FROM_PARENT = 0.05  # deviation of that around the loss of a parent
LIVE_NORM = Prior(-0.005, 0.01)
SHORT_LIVE_NORM = Prior(0.0, 0.01)  # where little heals, block scores say what a norm is worth
REGULARISED = Prior(0.0, 0.05)
FIRST_FFN = Prior(0.0, 0.1)  # of a nonlinear one in the first layer, beyond its block score, of another kind there
BLOCK_FACTORS = (Prior(0.0, 0.02), Prior(0.07, 0.1))  # of attention scores, of FFN scores
# The same where 32,768 tokens heal: two candidates of SmolLM2 kept 0.41 and 0.58 of theirs.
SHORT_FACTORS = (Prior(0.5, 0.3), Prior(0.5, 0.3))
SCARCITY = (Prior(0.15, 0.08), Prior(0.21, 0.05))  # of ln((1 + layers) / (1 + n)), n attentions, n nonlinear FFNs
GAPS = Prior(1.2, 0.4)  # of the share of pairs of layers with no attention from the first to the second


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Features:
    """Made by `features_of`; layers are numbered as in `stages`.

    sub_layer_forms: by layer, the numbers of its two sub-layer forms. num_forms: of those.
    kept: by layer, of heads and of a nonlinear FFN, as the function. live_norms: by layer.
    base: log-perplexity of a model of which nothing is scarce. live_norm: what one is worth.
    blocks: depth x layer x 2, ln(1 + score) of its halves, since what destroys a model heals the most; or None.
    unit: what WORTHS are in, nats.
    """

    stages: Stages
    sub_layer_forms: Index
    num_forms: int
    kept: Floats
    live_norms: Floats
    base: Prior
    live_norm: Prior
    blocks: Floats | None
    block_factors: tuple[Prior, Prior]
    from_parent: bool
    unit: float = 1.0

    @property
    def num_sub_layer_weights(self) -> int:
        return self.num_forms * len(self.stages.steps)

    def rows(self, members: Sequence[Member]) -> Floats:
        """Members x features: forms by depth, then base, live norms, regularised, first FFN, scarcity, gaps, scores."""
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
                self.kept[layers[:, 0], 1],
                lacking(self.kept[layers]),
                *([] if self.blocks is None else [self.blocks[depths, layers].sum(axis=1)]),
            ]
        )

    def _placed(self, member: Member) -> Sequence[Layer]:
        """Layers where they are trained: on which of the parent's."""
        layers = member.architecture.layers
        return spread_layers(layers) if self.from_parent else layers

    @property
    def _others(self) -> list[Prior]:
        """Priors of what is no form of a sub-layer, in the order of `rows`."""
        blocks = () if self.blocks is None else self.block_factors
        return [self.base, self.live_norm, REGULARISED, FIRST_FFN, *SCARCITY, GAPS, *blocks]

    @property
    def mean(self) -> Floats:
        """The prior mean of the weights."""
        return np.concatenate([np.zeros(self.num_sub_layer_weights), [prior.mean for prior in self._others]])

    @property
    def root(self) -> Floats:
        """The Cholesky factor of the prior covariance of the weights, where a form is worth 1 nat at a depth."""
        smooth = np.linalg.cholesky(smooth_covariance(len(self.stages.steps), SMOOTHNESS))
        root: Floats = block_diag(*[smooth] * self.num_forms, np.diag([prior.deviation for prior in self._others]))
        return root

    def scales(self, worth: float) -> Floats:
        """Factors of the columns of `root` where a form is worth so many nats at a depth (its deviation)."""
        return np.concatenate([np.full(self.num_sub_layer_weights, worth), np.ones(len(self._others))])

    def additive(self, weights: Floats, around: Floats) -> Scores:
        """Weights as scores that add up over layers, depth x layer.

        around: depth x 2, what the member is taken to keep elsewhere: what more is worth depends on that.
        """
        depths, size = np.arange(len(self.stages.steps)), self.num_sub_layer_weights
        _, live, _, first_ffn, *scarcity, gaps = weights[size : size + NUM_COUNTS]
        scores: Scores = self.live_norms * live + np.zeros((len(depths), 1))
        scores[0] += self.kept[:, 1] * first_ffn
        scores -= (self.kept[:, 0] > 0) * gaps * gap_shares_closed(around[:, 0] > 0)[:, None]
        for half in range(2):
            scores += weights[self.sub_layer_forms[:, half] * len(depths) + depths[:, None]]
            scores -= self.kept[:, half] * scarcity[half] / (1 + around[:, half].sum())
            if self.blocks is not None:
                scores += self.blocks[:, :, half] * weights[size + NUM_COUNTS + half]
        return scores


def lacking(left: Floats) -> Floats:
    """Members x 3: what the whole lacks of attentions, of nonlinear FFNs, and its gaps. left: members x depth x 2."""
    counts = np.log((1 + left.shape[1]) / (1 + left.sum(axis=1)))
    return np.column_stack([counts, gap_share(left[:, :, 0] > 0)])


def gap_share(has_attention: Bools) -> Floats:
    """The share of pairs of layers with no attention from the first to the second. has_attention: members x depth."""
    run, pairs = np.zeros(len(has_attention)), np.zeros(len(has_attention))
    for lacks in ~has_attention.T:
        run = (run + 1) * lacks
        pairs += run - lacks
    return pairs / max(1, comb(has_attention.shape[1], 2))


def gap_shares_closed(has_attention: Bools) -> Floats:
    """How much less that share is with attention at each depth than without, all else equal. has_attention: depth."""
    there = np.eye(len(has_attention), dtype=bool)
    closed: Floats = gap_share(has_attention & ~there) - gap_share(has_attention | there)
    return closed


def features_of(stages: Stages, problem: SearchProblem) -> Features:
    """Makes the features of a problem's space."""
    halves = [sub_layer_forms(layer) for layer in stages.layers]
    numbers = {form: number for number, form in enumerate(dict.fromkeys(form for both in halves for form in both))}
    blocks = None
    if problem.blocks is not None and problem.parent is not None:
        blocks = np.log1p(np.moveaxis(problem.blocks.by_layer(stages, problem.parent), 0, 2))
    base = BASE
    if problem.parent_loss is not None:
        base = Prior(problem.parent_loss, FROM_PARENT)
    return Features(
        stages=stages,
        sub_layer_forms=np.array([[numbers[form] for form in both] for both in halves], dtype=np.intp),
        num_forms=len(numbers),
        kept=np.array([kept(layer) for layer in stages.layers]),
        live_norms=np.array(
            [float(sum(norm in LIVE_NORMS for norm in (layer.norm1, layer.norm2))) for layer in stages.layers]
        ),
        base=base,
        live_norm=SHORT_LIVE_NORM if problem.heals_shortly else LIVE_NORM,
        blocks=blocks,
        block_factors=SHORT_FACTORS if problem.heals_shortly else BLOCK_FACTORS,
        from_parent=problem.parent is not None,
        unit=SHORT_UNIT if problem.heals_shortly else 1.0,
    )


def smooth_covariance(num_depths: int, smoothness: float) -> Floats:
    """Depths x depths: what is alike over so many layers, of unit variance."""
    depths = np.arange(num_depths)
    covariance: Floats = np.exp(-(((depths[:, None] - depths) / smoothness) ** 2) / 2) + JITTER * np.eye(num_depths)
    return covariance


def sub_layer_forms(layer: Layer) -> tuple[SubLayerForm, SubLayerForm]:
    return ("attention", layer.norm1, layer.attention), ("ffn", layer.norm2, layer.ffn, layer.stabiliser)


def kept(layer: Layer) -> tuple[float, float]:
    """The share of the heads, and 1 if there is a nonlinear FFN."""
    return HEADS.get(layer.attention, 1.0), float(layer.ffn not in (*LINEAR_FFNS, "none"))


class Observations(NamedTuple):
    """What is known of members, each once. rows: their features, members x features.

    losses: nats. variances: of each around the member's own mean over seeds, nats^2.
    """

    rows: Floats
    losses: Floats
    variances: Floats


class Posterior(NamedTuple):
    """Posterior distribution of the weights, and the discrepancy of a member.

    mean: features. root: of the covariance, features x features: the one that the Cholesky factors of prior and
    precision give, both far from singular, so that draws do not depend on who computes them.
    """

    mean: Floats
    root: Floats
    discrepancy: float

    def predict(self, rows: Floats) -> "PredictiveDistribution":
        """Predicts members with these features."""
        rooted = rows @ self.root
        return PredictiveDistribution(rooted, rows @ self.mean, (rooted**2).sum(axis=1), rooted, self.discrepancy)

    def draws(self, num: int, rng: np.random.Generator) -> Floats:
        """Weights drawn from the posterior, num x features."""
        drawn: Floats = self.mean + rng.normal(size=(num, len(self.mean))) @ self.root.T
        return drawn


class PredictiveDistribution(NamedTuple):
    """Log-perplexities of given members by a posterior, without discrepancy and the noise of a seed.

    rooted: their features times the root of the covariance. mean, variance: of each. crossed: the root times the
    covariance of each with the weights, members x features.
    """

    rooted: Floats
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
        shared = self.rooted @ self.crossed[place]
        gain = shared / (shared[place] + self.discrepancy**2 + SEED_NOISE**2)
        crossed = self.crossed - np.outer(gain, self.crossed[place])
        return self._replace(variance=self.variance - gain * shared, crossed=crossed)

    def with_own(self, losses: Floats, variances: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation of members whose own observations the posterior knows, discrepancies included.

        losses, variances: of those observations; infinite variance for none. Given the weights, what a member is beyond
        their sum is known from its own observation alone.
        """
        share = 1 / (1 + variances / self.discrepancy**2)  # of what is beyond the sum, that the observation shows
        mean = self.mean + share * (losses - self.mean)
        deviation = np.sqrt((1 - share) ** 2 * self.variance + (1 - share) * self.discrepancy**2)
        return mean, deviation


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """losses: of each observation. errors: of each, as all others predict it."""

    posterior: Posterior
    losses: Floats
    errors: Floats

    def r2(self) -> float:
        """R^2 of the observations: one minus their squared errors over those of their mean."""
        around = self.losses - self.losses.mean()
        return float(1 - self.errors @ self.errors / max(around @ around, 1e-12))


class _Whitened(NamedTuple):
    """Observations in terms of weights = mean + root @ (normal ones of unit variance), where a form is worth 1 nat.

    inner: the precision that the observations give those. seen: inner times where they draw them to. constant: the
    part of the negative log-likelihood that no weight changes.
    """

    inner: Floats
    seen: Floats
    constant: float


def fit(features: Features, known: Observations) -> Fit:
    """The posterior of the weights: by features rather than by observations, of which a long search has more."""
    apart, root = known.losses - known.rows @ features.mean, features.root
    rows = csr_array(known.rows)
    whitened = {
        discrepancy: _whitened(rows, root, apart, discrepancy**2 + known.variances) for discrepancy in DISCREPANCIES
    }
    scales = {worth: features.scales(features.unit * worth) for worth in WORTHS}
    worth, discrepancy = max(PAIRS, key=lambda pair: _log_posterior(whitened[pair[1]], scales[pair[0]], *pair))
    inner, seen, _ = whitened[discrepancy]
    scaled = root * scales[worth]
    factor = _precision_factor(inner, scales[worth])
    root = solve_triangular(factor, scaled.T, lower=True).T
    explained = root @ solve_triangular(factor, scales[worth] * seen, lower=True)
    variances = discrepancy**2 + known.variances
    rooted = known.rows @ root
    left = (1 - (rooted**2).sum(axis=1) / variances) / variances  # the diagonal of the inverse of their covariance
    return Fit(
        posterior=Posterior(features.mean + explained, root, discrepancy),
        losses=known.losses,
        errors=(apart - known.rows @ explained) / variances / left,
    )


def _whitened(rows: csr_array, root: Floats, apart: Floats, variances: Floats) -> _Whitened:
    weighed = csr_array(rows.multiply(1 / variances[:, None]))
    constant = apart @ (apart / variances) / 2 + np.log(variances).sum() / 2
    return _Whitened(root.T @ (rows.T @ weighed).toarray() @ root, root.T @ (weighed.T @ apart), float(constant))


def _precision_factor(inner: Floats, scale: Floats) -> Floats:
    """The Cholesky factor of the precision of normal ones whose weights have these scales."""
    factor: Floats = np.linalg.cholesky(scale[:, None] * inner * scale + np.eye(len(inner)))
    return factor


def _log_posterior(whitened: _Whitened, scale: Floats, worth: float, discrepancy: float) -> float:
    """The log-posterior of what a form is worth and of the discrepancy, but for a constant."""
    inner, seen, constant = whitened
    factor = _precision_factor(inner, scale)
    explained = solve_triangular(factor, scale * seen, lower=True)
    likelihood = explained @ explained / 2 - np.log(factor.diagonal()).sum() - constant
    return float(likelihood + _log_prior(worth, discrepancy))


def _log_prior(worth: float, discrepancy: float) -> float:
    apart = sum(float(np.log(value / usual)) ** 2 for value, usual in zip((worth, discrepancy), USUAL, strict=True))
    return -apart / 2 / SPREAD**2
