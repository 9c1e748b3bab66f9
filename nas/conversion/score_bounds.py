"""Set the bounds of bounded softmaxes and eighth powers, and query lengths of the latter, from scores on some tokens.

A bounded softmax subtracts a fixed bound from the scores of a head, instead of the maximum of each row. A row's sum of
exp(score - bound) must be neither too large nor too small for fixed point. The bound is the midpoint between the
smallest and the largest logarithm of a row's sum of exp(score). If these two logarithms are too far apart, `unheld`
lists the layer, and callers use the exact softmax there.

With eighth powers, an attention weight is (score - bound)^8 divided by the sum over its row. It does not change if
queries and bound are multiplied by the same number. That number is chosen for each head so that the midpoint of the
logarithms of row sums is the middle of the range in LOG_SUMS; heads that share the gain of a query norm get one number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from costmodel.ops import SoftmaxForm
from nas.attention.reference import Attended, log_sums
from nas.conversion.linear_fit import fitted_linears
from nas.conversion.parent import Parent
from nas.conversion.transfer import transferred
from nas.conversion.verified_fold import LOG_SUMS, ROWS_WITHIN, check_tokens
from nas.corpus.corpus import Corpus
from nas.model.decoder import Decoder
from nas.model.mpc_friendly import positive_scores
from nas.model.onednn import onednn_linears
from nas.model.weights import load_deployed
from nas.recipe.distillation import fitted_parts
from search_spaces.architecture import Layer

BOUNDING_TOKENS = 1 << 14  # about how many training tokens the bounds are set on
FIT_TOKENS = 1 << 11  # about how many tokens the length of queries is fitted on


def bounding_tokens(corpus: Corpus, vocab_size: int, seq_len: int) -> Tensor:
    """Return the tokens on which score bounds are set, sequences x T.

    First are those of the fold check (`check_tokens`), unless the validation split is too short for them. Then come
    sequences spread evenly over the training text, about BOUNDING_TOKENS to twice as many tokens, or the whole text if
    it is shorter. Fewer might lack the rows with the smallest and largest sums.
    """
    origin, checked = check_tokens(corpus, vocab_size, seq_len)
    length, train = checked.shape[1], corpus.tokens("train")
    every = max(1, len(train) // max(BOUNDING_TOKENS, length))
    starts = range(0, len(train) - length + 1, every * length)
    more = np.array([train[start : start + length] for start in starts], dtype=np.int64).reshape(-1, length)
    if corpus.begin_of_text is not None:
        corpus.begin_of_text.set_in(more)
    return torch.from_numpy(more if origin == "random" else np.concatenate((checked, more)))


@onednn_linears()
def set_bounds(model: Decoder, tokens: Tensor) -> dict[int, float]:
    """Set in place the bound of each head of bounded softmaxes, and the bound and query length of eighth powers.

    tokens: sequences x T, on which the scores are computed. Returns a number for each layer with bounds, by its index:
    half the difference between the logarithms of a head's largest and smallest row sums, for the head where it is most.
    For eighth powers, the smallest sums do not count, at most one row in a thousand: a few rows of almost equal scores
    may sum to almost nothing, while a sum that is too large would give a wrong inverse.
    """
    observers = {
        depth: _Observer(layer)
        for depth, layer in enumerate(model.layers)
        if getattr(layer.attention, "bound", None) is not None
    }
    for sequence in tokens if observers else ():
        model.features(sequence[None], with_entropies=False)
    return {depth: observer.leave() for depth, observer in observers.items()}


def unheld(farthest: Mapping[int, float], layers: Sequence[Layer], form: SoftmaxForm) -> tuple[int, ...]:
    """Return the indices of layers with `form` whose row sums do not fit into LOG_SUMS[form].

    farthest: result of `set_bounds` for a model with these layers.
    """
    held = half_range(form)
    return tuple(depth for depth, apart in farthest.items() if layers[depth].attention == form and not apart <= held)


def half_range(form: SoftmaxForm) -> float:
    """Return half the width of LOG_SUMS[form], the allowed range of the natural logarithm of a row's sum."""
    least, most = LOG_SUMS[form]
    return (most - least) / 2


def unheld_by_parent(parent: Parent, form: SoftmaxForm, tokens: Tensor) -> tuple[int, ...]:
    """Return the indices of layers with `form` whose row sums do not fit into LOG_SUMS[form], once it replaced softmax.

    tokens: sequences x T, on which row sums are computed. For eighth powers, the length of queries is first fitted to
    the parent's outputs (`fitted_linears`) on the last of these sequences, with about FIT_TOKENS tokens.
    """
    source = parent.model.architecture
    layers = tuple(
        replace(layer, attention=form) if layer.attention == "softmax" else layer  # type: ignore[arg-type]
        for layer in source.layers
    )
    target = replace(source, layers=layers)
    model = Decoder(target).eval()
    load_deployed(model, transferred(source, parent.model.weights, target))
    if parts := fitted_parts(target, source):
        few = tokens[-max(1, FIT_TOKENS // tokens.shape[1]) :]
        load_deployed(model, fitted_linears(parent.decoder(), model, parts, few))
    farthest = set_bounds(model, tokens)
    return unheld(farthest, layers, form)


class _Observer:
    """Replaces a layer's attention function to record the log row sums of each head."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.attention, self.attend = layer, layer.attention, layer.attention.attend
        self.cap = layer.attention.cap
        self.is_power = self.attention.bound.form == "power8"
        self.sums: list[Tensor] = []  # each heads x rows
        self.attention.attend = self

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, **settings: Any) -> Attended:
        if self.is_power:
            positive = positive_scores(queries, keys, "power8", self.attention.bound, settings["temperature"], self.cap)
            first = min(1, positive.shape[-2] - 1)  # the first row sums to 1 for any score
            rows = positive[..., first:, :].sum(dim=-1).log()
        else:
            rows = log_sums(queries, keys, settings["temperature"], self.cap)
        self.sums.append(rows.transpose(0, 1).flatten(1))
        attended: Attended = self.attend(queries, keys, values, **settings)
        return attended

    def leave(self) -> float:
        """Stop recording and set the bounds; return half the range of log row sums of the widest head."""
        self.attention.attend = self.attend
        sums = torch.cat(self.sums, dim=1)
        largest, least = sums.amax(dim=1), sums.amin(dim=1)
        if self.is_power:  # single rows of almost equal scores sum to almost nothing
            least = sums.quantile(1 - ROWS_WITHIN, dim=1, interpolation="lower")
        middle = (least + largest) / 2
        if self.is_power:
            sizes = torch.exp((sum(LOG_SUMS["power8"]) / 2 - middle) / 8)
            self.attention.bound.weight.mul_(self.layer.scale_queries(sizes))
        else:
            self.attention.bound.weight.copy_(middle)
        return float((largest - least).max() / 2)
