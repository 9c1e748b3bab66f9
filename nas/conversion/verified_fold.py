"""Check a folded model against the trained one, in single precision and in the fixed point of private inference.

Rounding errors grow if the new basis of the residual stream is far from orthogonal, which depends on the weights. Fixed
point is emulated: operands are rounded to the engine's resolution, and the result of every op is truncated to it. The
steps inside an op are exact here, for both models.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from costmodel import ops
from costmodel.execution import interpreter
from costmodel.execution.arithmetic import Arithmetic
from costmodel.execution.engine_arithmetic import ARITHMETICS
from costmodel.execution.memory import last_readers
from costmodel.execution.op_functions import SOFTMAX_FORMS, Array, evaluate, numpy_library, rounded_to
from costmodel.ops import SoftmaxForm
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from nas.conversion.change_of_basis import inner_norm_linears
from nas.conversion.fixed_point_scale import factor_for, inner_factor_for, with_inner_scales, with_stream_scale
from nas.conversion.fold import Folded, fold
from nas.corpus.corpus import Corpus
from nas.corpus.tokenizer import BeginOfText
from search_spaces.architecture import Architecture
from search_spaces.inner import inner_epsilon
from search_spaces.lower import lower

FRACTION_BITS = 18  # the engine's default
RING_BITS = 64
FIXED_POSITIONS = 512  # positions, rounded up to sequences, compared in fixed point too, which is several times slower
MAX_FLOAT_ERROR = 1e-4  # relative to the largest logit
MIN_AGREEMENT = 0.999  # share of positions
MAX_FIXED_RATIO = 2.0  # folding may cost one bit of the engine's precision
MAX_DIVERGENCE = 1e-3  # nats per token: 0.1 % of perplexity, too little to show
CHECK_POSITIONS = 4096  # enough to tell 99.9 % from 100 %
CHECK_LOGITS = 1 << 26  # about this many are compared at most, to limit memory
# Allowed range of the natural logarithm of a row's sum, for forms of softmax that do not subtract the row's maximum. A
# small sum has few digits, and each of a hundred terms has an error in the last; the inverse of a large sum has few
# digits. At the ends of the range the relative error is at most a twentieth. One row in a thousand may be outside, by
# up to BEYOND, where the relative error is a third.
LOG_SUMS: dict[SoftmaxForm, tuple[float, float]] = {"bounded": (-8.0, 8.0), "power8": (-7.8, 10.2)}
BEYOND, ROWS_WITHIN = 2.0, 0.999
LIMIT = 2.0 ** (RING_BITS - 2 - 2 * FRACTION_BITS)  # of a product, at most 62 bits before truncation
ROOT_LIMIT = 2.0 ** (FRACTION_BITS - 1)  # of the argument of an inverse square root; measured with SPU 0.9.5
MARGIN = 1.25  # factor by which numbers of other text may exceed those of a check

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldCheck:
    """Comparison of a folded model with the trained one.

    An error is the largest absolute difference of a logit, divided by the largest absolute logit.

    positions: number of tokens whose logits were compared in single precision.
    float_error: error of the folded model, with both models in single precision.
    agreement: share of `positions` where both models, in single precision, have the same most likely token.
    fixed_error, trained_fixed_error: errors of the folded and of the trained model in fixed point, against the trained
        model in double precision.
    fixed_divergence: KL(trained in double precision || folded in fixed point), nats per token.
    resolution: the smallest fixed-point number, relative to the largest logit.
    outside: what leaves fixed-point range, as texts: ops of the folded model (`execution.arithmetic`); squares in
        norms; and log row sums of bounded softmaxes and eighth powers that are not in LOG_SUMS (one in 1000 may be
        BEYOND outside).
    """

    positions: int
    float_error: float
    agreement: float
    fixed_error: float
    trained_fixed_error: float
    fixed_divergence: float
    resolution: float
    outside: tuple[str, ...] = ()

    @property
    def keeps_precision(self) -> bool:
        """Whether the folded model equals the trained one in single precision, fits fixed point, and is accurate in it.

        Models are equal if `why_not_equal` returns None. `fixed_error` may be at most twice `trained_fixed_error` plus
        `resolution`. False if an error is NaN.
        """
        return self._is_equal and self.fixed_error <= MAX_FIXED_RATIO * self.trained_fixed_error + self.resolution

    @property
    def passes(self) -> bool:
        """Whether it keeps precision or, if only `fixed_error` is too large, `fixed_divergence` is within the limit."""
        return self.keeps_precision or (self._is_equal and self.fixed_divergence <= MAX_DIVERGENCE)

    @property
    def _is_equal(self) -> bool:
        return not self.outside and why_not_equal(float_error=self.float_error, agreement=self.agreement) is None


def why_not_equal(*, float_error: float, agreement: float, **check: object) -> str | None:
    """Return why a folded model differs too much from the trained one in single precision; None if it does not.

    The limits are MAX_FLOAT_ERROR and MIN_AGREEMENT. float_error, agreement: fields of a FoldCheck. check: its other
        fields, which are ignored.
    """
    if float_error <= MAX_FLOAT_ERROR and agreement >= MIN_AGREEMENT:
        return None
    return (
        f"folding moves logits by {float_error:.2g} of the largest (at most {MAX_FLOAT_ERROR}), and {agreement:.2%} of "
        f"the most likely tokens agree (at least {MIN_AGREEMENT:.2%})"
    )


class VerifiedFold(NamedTuple):
    """A model that was folded as far as its check allows, and the check, which may fail all the same."""

    folded: Folded
    check: FoldCheck


class _Numbers(NamedTuple):
    """An arithmetic: floating point of a dtype, or fixed point with its smallest number and its engine's arithmetic."""

    dtype: Any = None
    unit: float = 0.0
    engine: Callable[[], Arithmetic] | None = None  # makes the arithmetic whose range is checked

    def operand(self, value: Array) -> Array:
        return rounded_to(self.unit, value, np.round) if self.unit else np.asarray(value, self.dtype)

    def result(self, value: Array) -> Array:
        return rounded_to(self.unit, value, np.floor) if self.unit else np.asarray(value, self.dtype)


DOUBLE, SINGLE = _Numbers(), _Numbers(np.float32)


def _fixed_points(protocol: str) -> list[_Numbers]:
    """Return the fixed point of a protocol for each choice of fraction bits, the most bits first."""
    facts = ENGINE_PROTOCOLS.get(protocol, ENGINE_PROTOCOLS["semi2k"])  # no engine here runs the others
    usual = facts.setting()
    settings = [replace(usual, fraction_bits=bits) for bits in facts.fraction_bits or (usual.fraction_bits,)]
    return [_Numbers(None, 2.0**-it.fraction_bits, partial(ARITHMETICS[facts.engine], it)) for it in settings]


class _Run(NamedTuple):
    """Logits, positions x vocabulary, and the largest absolute value in the run.

    square_share: largest square, or mean of squares, relative to its limit in fixed point, in norms of the stream.
    inner: by node of an inner norm: the same, and the least mean of squares, but for zeros; inf without any.
    sums_share: largest distance of a log row sum from the middle of LOG_SUMS, relative to the allowed one.
    broken: the first numbers of an op that leave the range of the engine's fixed point; None without any, as in
        floating point.
    """

    logits: Array
    largest: float
    square_share: float
    inner: Mapping[str, tuple[float, float]]
    sums_share: float
    broken: str | None = None

    @property
    def outside(self) -> tuple[str, ...]:
        """What leaves fixed-point range, as `FoldCheck.outside`."""
        shares = {
            "a number": self.largest / LIMIT,
            "a square in a norm": self.square_share,
            **{f"a square in {norm}": share for norm, (share, _) in self.inner.items()},
            "the distance of a row sum of attention from mid-range": self.sums_share,
        }
        reached = [f"{what} is {share:.3g} times its limit" for what, share in shares.items() if not share < 1]
        return tuple(reached if self.broken is None else (self.broken, *reached))


def fold_as_far_as(
    architecture: Architecture, weights: Mapping[str, Tensor], tokens: Tokens, protocol: str = "semi2k"
) -> VerifiedFold:
    """Return a trained model folded as far as precision allows, with the check; it may be scaled first (`Reference`).

    While a folded model does not keep precision (`FoldCheck.keeps_precision`), more linear FFNs or betas of stabilisers
    are left unfolded, those with the worst condition numbers first. If there is none to leave, the last attempt is
    returned all the same: gains of norms are always folded, and small gains cost bits of the weights that take them up.

    weights: by `<node>.<suffix>`. tokens: sequences x T to check on. protocol: protocol whose fixed point is emulated;
        semi2k's is used if no engine here runs the protocol. Raises UserError if the model is folded already.
    """
    trained = Reference.of(architecture, weights, tokens, protocol)
    architecture, weights = trained.architecture, trained.weights
    folded = fold(architecture, weights)
    while True:
        fixed = _run(folded.architecture, folded.weights, trained.few, trained.numbers)
        check = trained.check(folded, quick=True, fixed=fixed)
        if check.keeps_precision and (check := trained.check(folded, fixed=fixed)).keeps_precision:
            return VerifiedFold(folded, check)
        less = fold(architecture, weights, max_condition=folded.condition * (1 - 1e-6))
        if less.left == folded.left:
            return VerifiedFold(folded, trained.check(folded, fixed=fixed))
        folded = less


def check_tokens(
    corpus: Corpus | None, vocab_size: int, seq_len: int, begin: BeginOfText | None = None
) -> tuple[str, Tokens]:
    """Return the origin of the tokens for a check, `validation` or `random`, and the tokens, sequences x T.

    There are about CHECK_POSITIONS tokens, or fewer for a large vocabulary. They are random if there is no corpus, or
    its validation split is too short. seq_len: number of tokens T of a sequence, reduced to FIXED_POSITIONS if larger.
        begin: the token that begins each sequence if there is no corpus, or None.
    """
    positions, seq_len = min(CHECK_POSITIONS, CHECK_LOGITS // vocab_size), min(seq_len, FIXED_POSITIONS)
    shape = (-(-positions // seq_len), seq_len)
    tokens = () if corpus is None else corpus.tokens("validation")
    origin, sequences = "random", np.random.default_rng(0).integers(vocab_size, size=shape)
    if len(tokens) >= shape[0] * shape[1]:
        origin, sequences = "validation", np.array(tokens[: shape[0] * shape[1]], dtype=np.int64).reshape(shape)
    if begin := begin if corpus is None else corpus.begin_of_text:
        begin.set_in(sequences)
    return origin, sequences


class Reference(NamedTuple):
    """A trained model, scaled if needed (`nas.conversion.fixed_point_scale`), and its logits, positions x vocabulary.

    tokens: sequences x T. few: the first sequences of `tokens`, about FIXED_POSITIONS tokens or, if fewer, all.
    single: logits of all tokens in single precision. exact: logits of `few` in double precision. fixed_error: largest
        absolute difference from `exact` in fixed point. numbers: the fixed point with the most fraction bits in which
        the model stays within range; if it stays within range in none, the one with the fewest.
    """

    architecture: Architecture
    weights: Mapping[str, Tensor]
    tokens: Tokens
    few: Tokens
    single: Array
    exact: Array
    fixed_error: float
    numbers: _Numbers

    @classmethod
    def of(
        cls, architecture: Architecture, weights: Mapping[str, Tensor], tokens: Tokens, protocol: str = "semi2k"
    ) -> "Reference":
        """Return the reference of a trained model, which is scaled if squares in norms do not fit fixed point.

        tokens: sequences x T to run the model on. protocol: as in `fold_as_far_as`.
        """
        if architecture.tied_embeddings:
            weights = {"logits.weight": weights["embed.weight"], **weights}
        few = tokens[: -(-FIXED_POSITIONS // tokens.shape[1])]
        single = _run(architecture, weights, tokens, SINGLE)
        if (factor := factor_for(single.square_share * MARGIN)) < 1:
            architecture, weights = with_stream_scale(architecture, weights, factor)
        factors = {  # squares far below a norm's epsilon need no digits
            norm: inner_factor_for(share * MARGIN, max(least, inner_epsilon(architecture, norm)))
            for norm, (share, least) in single.inner.items()
        }
        architecture, weights = with_inner_scales(architecture, weights, factors)
        exact = _run(architecture, weights, few, DOUBLE).logits
        for numbers in _fixed_points(protocol):
            if (fixed := _run(architecture, weights, few, numbers)).broken is None:
                break
        fixed_error = _difference(fixed.logits, exact)
        return cls(architecture, weights, tokens, few, single.logits, exact, fixed_error, numbers)

    def check(self, folded: Folded, *, quick: bool = False, fixed: _Run | None = None) -> FoldCheck:
        """Return the comparison of a folded model with the trained one, in single precision and in fixed point.

        quick: whether to use only `few` in single precision too. fixed: fixed-point run on `few`; None to run it here.
        """
        tokens, largest = self.few if quick else self.tokens, float(np.abs(self.exact).max())
        ours, theirs = _run(folded.architecture, folded.weights, tokens, SINGLE).logits, self.single[: tokens.size]
        fixed = fixed or _run(folded.architecture, folded.weights, self.few, self.numbers)
        return FoldCheck(
            positions=len(ours),
            float_error=_difference(ours, theirs) / largest,
            agreement=float((ours.argmax(axis=-1) == theirs.argmax(axis=-1)).mean()),
            fixed_error=_difference(fixed.logits, self.exact) / largest,
            trained_fixed_error=self.fixed_error / largest,
            fixed_divergence=_divergence(self.exact, fixed.logits),
            resolution=self.numbers.unit / largest,
            outside=fixed.outside,
        )


def _difference(ours: Array, theirs: Array) -> float:
    return float(np.max([np.abs(our - their).max() for our, their in zip(ours, theirs, strict=True)]))


def _divergence(kept: Array, replaced: Array) -> float:
    """Return KL(kept || replaced) in nats per position, from logits of positions x vocabulary."""
    total = 0.0
    for row in zip(replaced, kept, strict=True):  # one by one, because all may take gigabytes
        ours, theirs = (logits - np.logaddexp.reduce(logits) for logits in row)
        total += float((np.exp(theirs) * (theirs - ours)).sum())
    return total / len(kept)


@np.errstate(all="ignore")  # what is not finite is not equal
def _run(architecture: Architecture, weights: Mapping[str, Tensor], tokens: Tokens, numbers: _Numbers) -> _Run:
    """Run all sequences through the op graph, node by node; memory holds each output only until its last reader."""
    graph, library = lower(architecture, tokens.shape[1]), numpy_library()
    arrays = {name: value.numpy() for name, value in weights.items()}
    spent = last_readers(graph.nodes)
    known: dict[str, list[Array]] = {}  # node -> output of every sequence
    largest, sums_share, broken = 0.0, 0.0, None
    inner = {norm: (0.0, math.inf) for norm, *_ in inner_norm_linears(architecture)}
    square_share = 0.0
    engine = None if numbers.engine is None else numbers.engine()
    for node in graph:
        operands = interpreter.operands(node, arrays)
        if isinstance(node.op, ops.TokenEmbedding):  # equal to a product with one-hot vectors
            values = [numbers.operand(operands["weight"][sequence]) for sequence in tokens]
        else:
            operands = {suffix: numbers.operand(operands.pop(suffix)) for suffix in tuple(operands)}
            sources = list(zip(*(known[name] for name in node.inputs), strict=True))
            values = [evaluate(node.op, library, operands, *source) for source in sources]
            if engine is not None and broken is None:
                reasons = (engine.why_outside(node, operands, *source) for source in sources)
                broken = next((reason for reason in reasons if reason is not None), None)
        if isinstance(node.op, ops.LayerNorm | ops.RmsNorm):
            share = max(_square_share(node.op, source) for source in known[node.inputs[0]])
            if node.name in inner and isinstance(node.op, ops.RmsNorm):
                inner[node.name] = share, min(_least_square(node.op, source) for source in known[node.inputs[0]])
            else:
                square_share = max(square_share, share)
        if isinstance(node.op, ops.Softmax) and node.op.form in LOG_SUMS:
            sums_share = max(sums_share, *(_sums_share(node.op, source) for source in known[node.inputs[0]]))
        known[node.name] = [numbers.result(value) for value in values]
        largest = max(largest, *(float(np.abs(value).max()) for value in known[node.name]))
        for name in spent[node.name]:
            del known[name]
    if engine is not None and broken is None and not engine.is_right(len(tokens)):
        broken = "too many results of a sequence would be wrong"
    return _Run(
        np.concatenate(known[graph.nodes[-1].name]),
        largest,
        square_share,
        inner,
        sums_share,
        broken,
    )


def _square_share(norm: ops.LayerNorm | ops.RmsNorm, source: Array) -> float:
    """Return the largest square or mean of squares, relative to its limit. source: rows x features."""
    squares = (source - source.mean(axis=-1, keepdims=True) if isinstance(norm, ops.LayerNorm) else source) ** 2
    groups = norm.groups if isinstance(norm, ops.RmsNorm) else 1
    return float(max(squares.max() / LIMIT, squares.reshape(len(source), groups, -1).mean(axis=-1).max() / ROOT_LIMIT))


def _least_square(norm: ops.RmsNorm, source: Array) -> float:
    """Return the least mean of squares of a group that is not 0; inf if all are."""
    means = (source.reshape(len(source), norm.groups, -1) ** 2).mean(axis=-1)
    return float(means[means > 0].min(initial=math.inf))


def _sums_share(op: ops.Softmax, scores: Array) -> float:
    """Return the largest distance of log row sums from mid-range, relative to its limits (ROWS_WITHIN, and all)."""
    least, most = LOG_SUMS[op.form]
    seen = np.tri(scores.shape[-1], dtype=bool)
    positive, _ = SOFTMAX_FORMS[op.form](numpy_library(), seen, scores)
    log_sums = np.log(np.where(seen, positive, 0.0).sum(axis=-1))
    apart, half = np.abs(log_sums - (least + most) / 2), (most - least) / 2
    return float(max(np.quantile(apart, ROWS_WITHIN, method="higher") / half, apart.max() / (half + BEYOND)))
