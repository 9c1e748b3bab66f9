"""Attention entropy as a regulariser, and as a diagnosis of collapse and overload."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from costmodel.errors import UserError
from nas.attention.reference import row_bounds
from nas.recipe.recipe import EntropyRegularisation
from nas.training.outcome import EntropySummary

COLLAPSE_SHARE = 0.02  # of ln T: a head below it attends to one token. Only recorded, since it can be useful


class EntropyPenalty(nn.Module):
    """The regulariser of all layers and heads, with its learned thresholds (layers x heads, shares of E_max).

    If layers differ in heads, `num_heads` is the largest number; thresholds without a head do not change. With the
    deviation d = E - threshold * E_max, the penalty is d^2 where |d| > margin * E_max, else 0. The regulariser's weight
    is not included.

    Source: arXiv 2501.03489, Algorithm 1.
    """

    def __init__(self, settings: EntropyRegularisation, *, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.settings = settings
        self.thresholds = nn.Parameter(torch.full((num_layers, num_heads), settings.threshold_init))

    @property
    def adds_up(self) -> bool:
        """Whether the penalty of a batch is the sum, not the mean, over its parts."""
        return self.settings.form == "published-code"

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        """Return the scalar penalty of row entropies in nats, batch x heads x T for each layer; 0 without heads."""
        num_heads = [layer.shape[1] for layer in layers]
        if not any(num_heads):  # all attention is gated to zero
            return 0.0 * self.thresholds.sum()
        if set(num_heads) == {self.thresholds.shape[1]}:
            entropies = torch.stack(tuple(layers))  # layers x batch x heads x T
            thresholds = self.thresholds[:, None, :, None]
        else:  # concatenates the heads of all layers, as if they were one
            of_heads = [row[:heads] for row, heads in zip(self.thresholds, num_heads, strict=True)]
            entropies = torch.cat(tuple(layers), dim=1)[None]
            thresholds = torch.cat(of_heads)[None, None, :, None]
        bounds = row_bounds(entropies.shape[-1], entropies.device).to(entropies.dtype)
        largest = bounds if self.settings.maximum == "causal" else bounds[-1].expand_as(bounds)  # E_max of every row
        if self.settings.form == "mean":  # all sequences have equal weight in any batch
            heads = entropies.mean(dim=-1, keepdim=True)
            return self._penalty(heads, thresholds, largest.mean()).mean()
        return self._penalty(entropies, thresholds, largest).sum(dim=(1, 3)).mean()

    def _penalty(self, entropies: Tensor, thresholds: Tensor, largest: Tensor) -> Tensor:
        deviation = entropies - thresholds * largest
        outside = deviation.detach().abs() > self.settings.margin * largest
        return deviation.square() * outside


def summarise(head_means: Sequence[Tensor], seq_len: int) -> EntropySummary:
    """Summarise the mean entropies of all heads, by layer, in nats, over sequences of seq_len tokens.

    Raises UserError if an entropy is not finite.
    """
    layers = [layer.detach().double().cpu() for layer in head_means]
    means = torch.cat(layers)
    if not means.isfinite().all():
        raise UserError("head entropies must be finite, but at least one is not; the model has diverged.")
    largest = means.max().item() if len(means) else 0.0
    relative = means / largest if largest > 0 else torch.zeros_like(means)
    quarters = (relative * 4).long().clamp(max=3)
    shares = [int((quarters == quarter).sum()) / max(1, len(means)) for quarter in range(4)]
    return EntropySummary(
        head_means=tuple(tuple(layer.tolist()) for layer in layers),
        num_collapsed=int((means < COLLAPSE_SHARE * math.log(seq_len)).sum()),
        quarter_shares=(shares[0], shares[1], shares[2], shares[3]),
    )
