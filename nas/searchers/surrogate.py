"""The surrogate of `trellis`: Bayesian linear regression of log-perplexity on sub-layers and a few global features.

The model is y = features @ weights + a discrepancy of each member + noise of each seed, all normal, with one feature
per form of sub-layer and depth, and a few for the whole model, because losses grow faster as components become scarce.
The standard deviations of form weights and discrepancy are the most probable ones of a grid.

Three global features are ln((1 + layers) / (1 + nonlinear FFNs)), the same for attentions (one with half of the heads
counts as half), and attention gaps: the share of pairs of layers with no attention from the first to the second, so
that no token mixing happens. `Features.rows` lists the others. Prior means, relative to the parent, are a least-squares
fit over four parents (docs/proxies.md). Block scores of attentions tell nothing that gaps do not, except after short
recovery; their weight is otherwise near 0.

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
from search_spaces.optima import Floats, Index, Scores, Stages

Bools: TypeAlias = NDArray[np.bool_]
SubLayerForm: TypeAlias = tuple[str, ...]  # norm, form and inner norms of a sub-layer, and the stabiliser of an FFN

SMOOTHNESS = 3.0  # layers over which the weights of a form are similar
JITTER = 1e-9  # added to the diagonal of a smooth covariance, so that it has a Cholesky factor
SEED_NOISE = 0.006  # nats, standard deviation between seeds of a candidate; experiments/data/fidelity.csv
WORTHS = (0.005, 0.01, 0.02, 0.05, 0.1)  # nats, standard deviation of the weight of a sub-layer form at one depth
DISCREPANCIES = (0.01, 0.02, 0.05, 0.1, 0.2)  # nats, standard deviation of the discrepancy
USUAL = (0.02, 0.05)  # centre of the prior of WORTHS, of DISCREPANCIES
PAIRS = tuple(product(WORTHS, DISCREPANCIES))
SHORT_UNIT = 0.1  # factor of WORTHS after short recovery, where most block scores are below 0.003 nats
HEADS = {"none": 0.0, "softmax-half": 0.5}  # share of a layer's heads; all of them in other forms
NUM_COUNTS = 7  # global features other than block scores
SPREAD = 1.0  # standard deviation of the logarithms of WORTHS and DISCREPANCIES around USUAL


class Prior(NamedTuple):
    """Mean and standard deviation of a weight's normal prior."""

    mean: float
    deviation: float


class Priors(NamedTuple):
    """Priors of the weights of global features, in nats: all that is fitted to other parents, by docs/proxies.md.

    live_norm: per norm that is not frozen. regularised: by entropy. first_ffn: a nonlinear FFN in the first layer,
        beyond its block score. attention_scarcity, ffn_scarcity: per ln((1 + layers) / (1 + n)), for n attentions or
        nonlinear FFNs. attention_gaps: per share of pairs of layers with no attention from the first to the second.
        attention_scores, ffn_scores: per ln(1 + block score), summed over sub-layers.
    """

    live_norm: Prior = Prior(-0.005, 0.01)
    regularised: Prior = Prior(0.0, 0.05)
    first_ffn: Prior = Prior(0.0, 0.1)
    attention_scarcity: Prior = Prior(0.15, 0.08)
    ffn_scarcity: Prior = Prior(0.21, 0.05)
    attention_gaps: Prior = Prior(1.2, 0.4)
    attention_scores: Prior = Prior(0.0, 0.02)
    ffn_scores: Prior = Prior(0.07, 0.1)


BASE = Prior(2.4, 1.0)  # log-perplexity from scratch, when nothing is scarce
FROM_PARENT = 0.05  # standard deviation around the parent's loss
# After short recovery block scores already contain the effect of norms. SmolLM2 kept 0.41 and 0.58 of its scores in two
# candidates after 32,768 tokens, and 0.56 to 0.75 in the five best of 15 after 16,384; Gemma 3 270M kept 0.47 in one.
SHORT_SCORES = Prior(0.5, 0.2)
SHORT = Priors(live_norm=Prior(0.0, 0.01), attention_scores=SHORT_SCORES, ffn_scores=SHORT_SCORES)


def priors_of(*, short_finetune: bool) -> Priors:
    """Return the priors for a search. short_finetune: as in `SearchProblem`."""
    return SHORT if short_finetune else Priors()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Features:
    """The features of members and the prior of their weights, made by `features_of`.

    stages: the choices of the space, which number the layers.
    sub_layer_forms: layer x 2, the numbers, below `num_forms`, of the forms of attention and FFN.
    kept: layer x 2, share of heads that the layer has, and 1 for a nonlinear FFN, else 0.
    live_norms: number of live norms of each layer.
    base: prior of the log-perplexity when neither attentions nor FFNs are scarce. priors: those of the other weights.
    blocks: depth x layer x 2, ln(1 + block score), since the largest losses recover most; None without scores.
    from_parent: whether candidates start from a parent. unit: factor by which WORTHS are multiplied.
    """

    stages: Stages
    sub_layer_forms: Index
    num_forms: int
    kept: Floats
    live_norms: Floats
    base: Prior
    priors: Priors
    blocks: Floats | None
    from_parent: bool
    unit: float = 1.0

    @property
    def num_sub_layer_weights(self) -> int:
        return self.num_forms * len(self.stages.steps)

    def rows(self, members: Sequence[Member]) -> Floats:
        """Return the features of members, members x features.

        The order of features is: forms by depth, base, live norms, regularised, first FFN, scarcity, gaps, scores.
        """
        given = [member.architecture.layers for member in members]
        # with a parent, at the depths of its layers that initialise them
        layers = self.stages.numbered([spread_layers(layers) for layers in given] if self.from_parent else given)
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

    @property
    def _others(self) -> list[Prior]:
        """Priors of the weights after those of sub-layer forms, in the order of `rows`."""
        return [self.base, *self.priors[: NUM_COUNTS - 1 if self.blocks is None else None]]

    @property
    def mean(self) -> Floats:
        """Prior mean of the weights."""
        return np.concatenate([np.zeros(self.num_sub_layer_weights), [prior.mean for prior in self._others]])

    @property
    def root(self) -> Floats:
        """Cholesky factor of the prior covariance of the weights, with a deviation of 1 nat for form weights."""
        smooth = np.linalg.cholesky(smooth_covariance(len(self.stages.steps), SMOOTHNESS))
        root: Floats = block_diag(*[smooth] * self.num_forms, np.diag([prior.deviation for prior in self._others]))
        return root

    def scales(self, worth: float) -> Floats:
        """Return the factor of each column of `root` that gives form weights a standard deviation of `worth` nats."""
        return np.concatenate([np.full(self.num_sub_layer_weights, worth), np.ones(len(self._others))])

    def additive(self, weights: Floats, around: Floats) -> Scores:
        """Return scores, depth x layer, whose sum over a member's layers is about its predicted loss plus a constant.

        The global features are linearised around a member. around: depth x 2, `kept` of the layers of this member.
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
    """Return members x 3: scarcity of attentions and nonlinear FFNs, and attention gaps.

    left: members x depth x 2, the results of `kept` for each layer.
    """
    counts = np.log((1 + left.shape[1]) / (1 + left.sum(axis=1)))
    return np.column_stack([counts, gap_share(left[:, :, 0] > 0)])


def gap_share(has_attention: Bools) -> Floats:
    """Return the share of layer pairs i < j without attention in layers i to j. has_attention: members x depth."""
    run, pairs = np.zeros(len(has_attention)), np.zeros(len(has_attention))
    for lacks in ~has_attention.T:
        run = (run + 1) * lacks
        pairs += run - lacks
    return pairs / max(1, comb(has_attention.shape[1], 2))


def gap_shares_closed(has_attention: Bools) -> Floats:
    """Return, for each depth, by how much attention there lowers a member's `gap_share`. has_attention: by depth."""
    there = np.eye(len(has_attention), dtype=bool)
    closed: Floats = gap_share(has_attention & ~there) - gap_share(has_attention | there)
    return closed


def features_of(stages: Stages, problem: SearchProblem) -> Features:
    """Return the features of a problem's space. stages: result of `stages_of` for this space."""
    halves = [sub_layer_forms(layer) for layer in stages.layers]
    numbers = {form: number for number, form in enumerate(dict.fromkeys(form for both in halves for form in both))}
    blocks = None
    if problem.blocks is not None and problem.parent is not None:
        blocks = np.log1p(np.moveaxis(problem.blocks.by_layer(stages, problem.parent), 0, 2))
    return Features(
        stages=stages,
        sub_layer_forms=np.array([[numbers[form] for form in both] for both in halves], dtype=np.intp),
        num_forms=len(numbers),
        kept=np.array([kept(layer) for layer in stages.layers]),
        live_norms=np.array(
            [float(sum(norm in LIVE_NORMS for norm in (layer.norm1, layer.norm2))) for layer in stages.layers]
        ),
        base=BASE if problem.parent_loss is None else Prior(problem.parent_loss, FROM_PARENT),
        priors=priors_of(short_finetune=problem.short_finetune),
        blocks=blocks,
        from_parent=problem.parent is not None,
        unit=SHORT_UNIT if problem.short_finetune else 1.0,
    )


def smooth_covariance(num_depths: int, smoothness: float) -> Floats:
    """Return the squared-exponential covariance, depths x depths, with `smoothness` layers as its length scale."""
    depths = np.arange(num_depths)
    covariance: Floats = np.exp(-(((depths[:, None] - depths) / smoothness) ** 2) / 2) + JITTER * np.eye(num_depths)
    return covariance


def sub_layer_forms(layer: Layer) -> tuple[SubLayerForm, SubLayerForm]:
    attention = ("attention", layer.norm1, layer.attention, layer.inner1)
    return attention, ("ffn", layer.norm2, layer.ffn, layer.stabiliser, layer.inner2)


def kept(layer: Layer) -> tuple[float, float]:
    """Return the share of heads that a layer keeps, and 1 if it has a nonlinear FFN, else 0."""
    return HEADS.get(layer.attention, 1.0), float(layer.ffn not in (*LINEAR_FFNS, "none"))


class Observations(NamedTuple):
    """Observed losses, one per member.

    rows: members x features. losses: nats. variances: of each loss around the member's mean over seeds, nats^2.
    """

    rows: Floats
    losses: Floats
    variances: Floats


class Posterior(NamedTuple):
    """Posterior distribution of the weights, and the standard deviation of the discrepancy of a member.

    mean: one per feature. root: square root of the covariance, features x features. discrepancy: nats.
    """

    mean: Floats
    root: Floats
    discrepancy: float

    def predict(self, rows: Floats) -> "PredictiveDistribution":
        """Predict the log-perplexity of members. rows: their features, members x features."""
        rooted = rows @ self.root
        return PredictiveDistribution(rooted, rows @ self.mean, (rooted**2).sum(axis=1), rooted, self.discrepancy)

    def draws(self, num: int, rng: np.random.Generator) -> Floats:
        """Draw weights from the posterior, num x features."""
        drawn: Floats = self.mean + rng.normal(size=(num, len(self.mean))) @ self.root.T
        return drawn


class PredictiveDistribution(NamedTuple):
    """Predicted log-perplexities of members, without discrepancy and seed noise.

    rooted: features times the root of the covariance, members x features. mean, variance: one number per member, nats
        and nats^2. crossed: covariance of each prediction with z, where the weights are mean + root @ z, members x
        features. discrepancy: standard deviation of a member's discrepancy, nats.
    """

    rooted: Floats
    mean: Floats
    variance: Floats
    crossed: Floats
    discrepancy: float

    @property
    def deviation(self) -> Floats:
        """Standard deviation of each member's log-perplexity, discrepancy included, nats."""
        deviation: Floats = np.sqrt(self.variance + self.discrepancy**2)
        return deviation

    def condition_on(self, place: int) -> "PredictiveDistribution":
        """Return the distribution after observing the member of row `place`, with seed noise, at its predicted mean.

        The means stay as they are; only the variances shrink.
        """
        shared = self.rooted @ self.crossed[place]
        gain = shared / (shared[place] + self.discrepancy**2 + SEED_NOISE**2)
        crossed = self.crossed - np.outer(gain, self.crossed[place])
        return self._replace(variance=self.variance - gain * shared, crossed=crossed)

    def with_own(self, losses: Floats, variances: Floats) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of each member's log-perplexity, discrepancy included.

        losses, variances: each member's own observation; an infinite variance stands for none. The weights are fitted
            to all observations already, but only a member's own observation tells of its discrepancy.
        """
        share = 1 / (1 + variances / self.discrepancy**2)  # of the discrepancy that the observation reveals
        mean = self.mean + share * (losses - self.mean)
        deviation = np.sqrt((1 - share) ** 2 * self.variance + (1 - share) * self.discrepancy**2)
        return mean, deviation


class _Whitened(NamedTuple):
    """Observations in terms of z, with weights = mean + root @ z and z standard normal.

    inner: precision that the observations add to z. seen: linear term of their log-likelihood in z. constant: terms of
        the negative log-likelihood that do not depend on z.
    """

    inner: Floats
    seen: Floats
    constant: float


def fit(features: Features, known: Observations) -> Posterior:
    """Return the posterior of the weights for the most probable pair of standard deviations in PAIRS."""
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
    # from Cholesky factors of prior and precision, both far from singular, so that rounding hardly changes draws
    root = solve_triangular(factor, scaled.T, lower=True).T
    explained = root @ solve_triangular(factor, scales[worth] * seen, lower=True)
    return Posterior(features.mean + explained, root, discrepancy)


def _whitened(rows: csr_array, root: Floats, apart: Floats, variances: Floats) -> _Whitened:
    weighed = csr_array(rows.multiply(1 / variances[:, None]))
    constant = apart @ (apart / variances) / 2 + np.log(variances).sum() / 2
    return _Whitened(root.T @ (rows.T @ weighed).toarray() @ root, root.T @ (weighed.T @ apart), float(constant))


def _precision_factor(inner: Floats, scale: Floats) -> Floats:
    factor: Floats = np.linalg.cholesky(scale[:, None] * inner * scale + np.eye(len(inner)))
    return factor


def _log_posterior(whitened: _Whitened, scale: Floats, worth: float, discrepancy: float) -> float:
    inner, seen, constant = whitened
    factor = _precision_factor(inner, scale)
    explained = solve_triangular(factor, scale * seen, lower=True)
    likelihood = explained @ explained / 2 - np.log(factor.diagonal()).sum() - constant
    return float(likelihood + _log_prior(worth, discrepancy))


def _log_prior(worth: float, discrepancy: float) -> float:
    apart = sum(float(np.log(value / usual)) ** 2 for value, usual in zip((worth, discrepancy), USUAL, strict=True))
    return -apart / 2 / SPREAD**2
