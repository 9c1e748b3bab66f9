"""Replacements of softmax and GELU where an architecture has them, as in `op_functions`."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from costmodel.execution.op_functions import QUAD_SHIFT, RELU_SUM_OFFSET
from costmodel.execution.piecewise_gelu import CUBIC, EVEN, THRESHOLDS
from costmodel.ops import SoftmaxForm
from nas.attention.causal import Attended, causal_attention, row_bounds, scale_by_temperature

Attention = Callable[..., Attended]  # as `causal_attention`

# form -> a number of at least 0 for every score, and what is added to their sum over a row
FORMS: dict[SoftmaxForm, tuple[Callable[[Tensor], Tensor], float]] = {
    "2quad": (lambda scores: (scores + QUAD_SHIFT).square(), 0.0),
    "relu": (functional.relu, RELU_SUM_OFFSET),
}


def attention_of(form: SoftmaxForm) -> Attention:
    """Causal attention under a form of softmax, with the entropy of its rows. A bound cancels out of a softmax."""
    return partial(normalised_attention, form=form) if form in FORMS else causal_attention


def normalised_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    form: SoftmaxForm,
    temperature: Tensor | None = None,
    with_entropy: bool = True,
) -> Attended:
    """Attention whose weights are positive numbers over their row sum, over the whole T x T matrix; in fp32 at least.

    queries, keys, values: batch x heads x T x head_dim; temperature: heads x T. The entropy is that of the weights
    scaled to a sum of 1, which an offset leaves just below; a row of zeros attends to nothing and has entropy 0.
    """
    length, head_dim = queries.shape[-2:]
    dtype = torch.promote_types(values.dtype, torch.float32)
    scores = (
        scale_by_temperature(queries.to(dtype), temperature) @ keys.to(dtype).transpose(-2, -1) / math.sqrt(head_dim)
    )
    seen = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
    positive_of, offset = FORMS[form]
    positive = positive_of(scores).masked_fill(~seen, 0.0)
    sums = positive.sum(dim=-1, keepdim=True)
    output = positive / (sums + offset) @ values.to(dtype)
    if not with_entropy:
        return Attended(output.to(values.dtype), None)
    shares = positive / sums.masked_fill(sums == 0, 1.0)
    entropy = -(shares * shares.masked_fill(shares == 0, 1.0).log()).sum(dim=-1)
    upper = row_bounds(length, entropy.device).to(dtype)
    return Attended(output.to(values.dtype), torch.minimum(entropy.clamp(min=0.0), upper))


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
