"""What the surrogate of `trellis` sees of a member, and what it expects of that before any result.

The log-perplexity of a member is taken to be a sum over its half layers, of what each form is worth at its depth, and
of a few counts of the whole, by which losses grow as things run out. Prior means and deviations of counts and block
scores are from least squares over the 16 placements of `experiments/configs/fidelity.yaml`, which no benchmark of
searchers uses, when linear FFNs did not start from the parent's yet: 1.5 + 0.07 attention scores + 0.2 FFN scores +
0.7 / (1 + nonlinear FFNs) + 5.4 / (1 + attentions) left 0.05 nats of 0.40 (standard deviations). Of their present
losses the prior leaves 0.16 of 0.34.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from nas.recipe.distillation import spread_layers
from nas.searchers.strategy import SearchProblem
from search_spaces.architecture import LIVE_NORMS, Layer
from search_spaces.deployed import LINEAR_FFNS
from search_spaces.notation import Member
from search_spaces.optima.stages import Floats, Index, Scores, Stages

HalfForm: TypeAlias = tuple[str, ...]  # norm and form of a half layer, of an FFN its stabiliser too

SMOOTHNESS = 3.0  # layers over which what a form is worth is alike
JITTER = 1e-9  # on the diagonal of a smooth covariance, so that it has a root


class Prior(NamedTuple):
    """Of the weight of a feature."""

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

    half_forms: by layer, the numbers of its two half forms. num_forms: of those.
    is_kept: by layer, 1 with attention, 1 with a nonlinear FFN. live_norms: by layer.
    base: log-perplexity of a model of which nothing is scarce.
    blocks: depth x layer x 2, ln(1 + score) of its halves, since what destroys a model heals the most; or None.
    """

    stages: Stages
    half_forms: Index
    num_forms: int
    is_kept: Floats
    live_norms: Floats
    base: Prior
    blocks: Floats | None
    from_parent: bool

    @property
    def num_half_weights(self) -> int:
        return self.num_forms * len(self.stages.steps)

    def rows(self, members: Sequence[Member]) -> Floats:
        """Members x features: half forms by depth, base, live norms, regularised, first FFN, scarcity, block scores."""
        layers = self.stages.numbered([self._placed(one) for one in members])
        depths = np.arange(layers.shape[1])
        halves = np.zeros((len(members), self.num_half_weights))
        for half in range(2):
            places = self.half_forms[layers, half] * len(depths) + depths
            np.put_along_axis(halves, places, 1.0, axis=1)
        return np.column_stack(
            [
                halves,
                np.ones(len(members)),
                self.live_norms[layers].sum(axis=1),
                [float(one.entropy_regularised) for one in members],
                self.is_kept[layers[:, 0], 1],
                1 / (1 + self.is_kept[layers].sum(axis=1)),
                *([] if self.blocks is None else [self.blocks[depths, layers].sum(axis=1)]),
            ]
        )

    def _placed(self, member: Member) -> Sequence[Layer]:
        """As it is trained: on which of the parent's layers."""
        layers = member.architecture.layers
        return spread_layers(layers) if self.from_parent else layers

    def prior(self, worth: float) -> tuple[Floats, Floats]:
        """Mean and covariance of the weights. worth: deviation of what a half form is worth at a depth, in nats."""
        blocks = () if self.blocks is None else BLOCK_FACTORS
        others = [self.base, LIVE_NORM, REGULARISED, FIRST_FFN, *SCARCITY, *blocks]
        smooth = smooth_covariance(len(self.stages.steps), SMOOTHNESS)
        size = self.num_half_weights
        covariance = np.zeros((size + len(others), size + len(others)))
        covariance[:size, :size] = np.kron(np.eye(self.num_forms), worth**2 * smooth)
        covariance[range(size, len(covariance)), range(size, len(covariance))] = [one.deviation**2 for one in others]
        return np.concatenate([np.zeros(size), [one.mean for one in others]]), covariance

    def additive(self, weights: Floats, kept: Sequence[float]) -> Scores:
        """Weights as scores that add up over layers, depth x layer.

        kept: how many attentions, and how many nonlinear FFNs, the member is taken to have: what one more is worth
        depends on that.
        """
        depths, size = np.arange(len(self.stages.steps)), self.num_half_weights
        _, live, _, first_ffn, *rest = weights[size:]
        scores: Scores = self.live_norms * live + np.zeros((len(depths), 1))
        scores[0] += self.is_kept[:, 1] * first_ffn
        for half in range(2):
            scores += weights[self.half_forms[:, half] * len(depths) + depths[:, None]]
            scores -= self.is_kept[:, half] * rest[half] / (1 + kept[half]) ** 2
            if self.blocks is not None:
                scores += self.blocks[:, :, half] * rest[2 + half]
        return scores


def features_of(stages: Stages, problem: SearchProblem) -> Features:
    """What there is to see of the members of a problem's space."""
    halves = [half_forms(layer) for layer in stages.layers]
    numbers = {form: number for number, form in enumerate(dict.fromkeys(form for both in halves for form in both))}
    blocks = None
    if problem.blocks is not None and problem.parent is not None:
        blocks = np.log1p(np.moveaxis(problem.blocks.by_half(stages, problem.parent), 0, 2))
    base = BASE
    if problem.parent_loss is not None:
        scarce = sum(prior.mean for prior in SCARCITY) / (1 + len(stages.steps))
        base = Prior(problem.parent_loss - scarce, FROM_PARENT)
    return Features(
        stages=stages,
        half_forms=np.array([[numbers[form] for form in both] for both in halves], dtype=np.intp),
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


def half_forms(layer: Layer) -> tuple[HalfForm, HalfForm]:
    return ("attention", layer.norm1, layer.attention), ("ffn", layer.norm2, layer.ffn, layer.stabiliser)


def _is_kept(layer: Layer) -> tuple[bool, bool]:
    return layer.attention != "none", layer.ffn not in (*LINEAR_FFNS, "none")


def _norms(layer: Layer) -> tuple[str, str]:
    return layer.norm1, layer.norm2
