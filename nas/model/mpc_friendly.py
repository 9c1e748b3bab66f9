"""Replacements of softmax and GELU, computed as in `costmodel.execution.op_functions`; exports include this code."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from costmodel.execution.op_functions import CUBIC, EVEN, QUAD_SHIFT, RELU_SUM_OFFSET, THRESHOLDS
from nas.attention.reference import Attended, bounded, causal_scores, upcast

# form -> a function of scores that is at least 0, and a constant that is added to its row sum
FORMS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "2quad": (lambda scores: (scores + QUAD_SHIFT).square(), 0.0),
    "power8": (lambda scores: scores.square().square().square(), 0.0),
    "relu": (functional.relu, RELU_SUM_OFFSET),
}
# Initial values for eighth powers: (x / 16 + 1/2)^8 is (1 + x / 8)^8 / 256, which is nearly exp(x) / 256.
POWER_BOUND = -0.5
QUERY_SCALES: dict[str, float] = {"power8": -POWER_BOUND / 8}


def query_scale(form: str) -> float:
    """Return the factor by which initial queries for a form of softmax differ from those for an exact softmax."""
    return QUERY_SCALES.get(form, 1.0)


class ScoreBound(nn.Module):
    """A number per head that is subtracted from the scores before they are normalised.

    For form `power8` it is learned, starts at -0.5, and is rescaled with the queries by `nas.conversion.score_bounds`.
    For `bounded` it starts at 0 and is set there: it limits exponentials in private inference, and does not change the
    exact softmax that torch computes in place of a bounded one.
    """

    weight: Tensor

    def __init__(self, num_heads: int, form: str) -> None:
        super().__init__()
        self.form = form
        if form == "power8":
            self.weight = nn.Parameter(torch.full((num_heads,), POWER_BOUND))
        else:
            self.register_buffer("weight", torch.zeros(num_heads))


def normalised_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    form: str,
    bound: ScoreBound | None = None,
    cap: float | None = None,
    temperature: Tensor | None = None,
    with_entropy: bool = True,
) -> Attended:
    """Return causal attention with weights f(scores) / (row sum of f(scores) + c), where `FORMS[form]` is f and c.

    queries, keys, values: batch x heads x T x head_dim; temperature: heads x T. bound: what is subtracted from the
        scores. cap: scores x become cap * tanh(x / cap); None for no cap. The T x T matrix is computed in fp32, or fp64
        for fp64 values; the output has the type of the values. Entropies are of weights scaled to a sum of 1; a row of
        zeros attends to nothing and has entropy 0.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    positive = positive_scores(queries.to(dtype), keys.to(dtype), form, bound, temperature, cap)
    sums = positive.sum(dim=-1, keepdim=True)
    output = positive / (sums + FORMS[form][1]) @ values.to(dtype)
    if not with_entropy:
        return Attended(output.to(values.dtype), None)
    shares = positive / sums.masked_fill(sums == 0, 1.0)
    entropy = -(shares * shares.masked_fill(shares == 0, 1.0).log()).sum(dim=-1)
    return Attended(output.to(values.dtype), bounded(entropy))


def last_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    form: str,
    bound: ScoreBound | None,
    cap: float | None,
    temperature: Tensor | None,
) -> Tensor:
    """Return the attention output of the last `rows` of T tokens, batch x heads x rows x head_dim.

    queries: batch x heads x rows x head_dim; keys, values: batch x heads x T x head_dim; temperature: heads x rows.
        form: a key of `FORMS`, or any other name for softmax, which ignores `bound`.
    """
    dtype = values.dtype
    queries, keys, values = upcast(queries, keys, values)
    if form in FORMS:
        positive = positive_scores(queries, keys, form, bound, temperature, cap)
        weights = positive / (positive.sum(dim=-1, keepdim=True) + FORMS[form][1])
    else:
        scores, seen = causal_scores(queries, keys, temperature, cap)
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
    return (weights @ values).to(dtype)


def positive_scores(
    queries: Tensor,
    keys: Tensor,
    form: str,
    bound: ScoreBound | None,
    temperature: Tensor | None,
    cap: float | None = None,
) -> Tensor:
    """Return the numerators of the attention weights: at least 0, and 0 where masked; batch x heads x queries x keys.

    The queries are those of the last tokens, or of all. With eighth powers, the first token's only numerator is 1.
    """
    scores, seen = causal_scores(queries, keys, temperature, cap)
    scores = scores if bound is None else scores - bound.weight[:, None, None]
    positive = FORMS[form][0](scores).masked_fill(~seen, 0.0)
    if form == "power8" and queries.shape[-2] == keys.shape[-2]:
        positive[..., 0, 0] = 1.0  # the only one of its row, and its power may be almost 0
    return positive


class PiecewiseGelu(nn.Module):
    """GELU by polynomials between thresholds, each evaluated inside its own segment only, so that none overflows."""

    def forward(self, source: Tensor) -> Tensor:
        low, middle, high = THRESHOLDS
        tail, inside = source.clamp(low, middle), source.clamp(middle, high)
        square = inside.square()
        cubic = ((CUBIC[3] * tail + CUBIC[2]) * tail + CUBIC[1]) * tail + CUBIC[0]
        even = ((EVEN[3] * square + EVEN[2]) * square + EVEN[1]) * square + EVEN[0]
        below_high = torch.where(source < middle, cubic, inside / 2 + even)
        return torch.where(source < low, 0.0, torch.where(source < high, below_high, source))
