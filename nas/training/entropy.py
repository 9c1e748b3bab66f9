"""Attention entropy as a training signal (the regulariser) and as a diagnosis (collapse and overload)."""

import math

import torch
from torch import Tensor, nn

from costmodel.errors import UserError
from nas.attention.causal import row_bounds
from nas.recipe.recipe import EntropyRegularisation
from nas.training.outcome import EntropySummary

COLLAPSE_SHARE = 0.02  # of ln T: below it a head looks at one token. Recorded, no stop: a sharp head can be useful


class EntropyPenalty(nn.Module):
    """The regulariser of every layer and head at once, with its learned thresholds (layers x heads, shares of E_max).

    With deviation d = E - threshold * E_max the penalty is d^2 where |d| > margin * E_max, else 0. Not yet multiplied
    by the regulariser's weight.

    Source: arXiv 2501.03489, Algorithm 1.
    """

    def __init__(self, settings: EntropyRegularisation, *, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.settings = settings
        self.thresholds = nn.Parameter(torch.full((num_layers, num_heads), settings.threshold_init))

    @property
    def adds_up(self) -> bool:
        """Whether the penalty of a batch is the sum of those of its parts, and not their mean."""
        return self.settings.form == "published-code"

    def forward(self, entropies: Tensor) -> Tensor:
        """The scalar penalty of row entropies, layers x batch x heads x T, in nats."""
        thresholds = self.thresholds[:, None, :, None]
        largest = self._largest(entropies)
        if self.settings.form == "mean":  # every sequence counts alike, whatever the batch
            heads = entropies.mean(dim=-1, keepdim=True)
            return self._penalty(heads, thresholds, largest.mean()).mean()
        return self._penalty(entropies, thresholds, largest).sum(dim=(1, 3)).mean()

    def _largest(self, entropies: Tensor) -> Tensor:
        """E_max of every row."""
        bounds = row_bounds(entropies.shape[-1], entropies.device).to(entropies.dtype)
        return bounds if self.settings.maximum == "causal" else bounds[-1].expand_as(bounds)

    def _penalty(self, entropies: Tensor, thresholds: Tensor, largest: Tensor) -> Tensor:
        deviation = entropies - thresholds * largest
        outside = deviation.detach().abs() > self.settings.margin * largest
        return deviation.square() * outside


def summarise(head_means: Tensor, seq_len: int) -> EntropySummary:
    """The diagnosis of mean entropies, layers x heads, in nats, over sequences of seq_len tokens.

    Raises UserError if an entropy is not finite.
    """
    if not head_means.isfinite().all():
        raise UserError("head entropies must be finite, but at least one is not; the model has diverged.")
    means = head_means.detach().double().cpu()
    largest = means.max().item()
    relative = means / largest if largest > 0 else torch.zeros_like(means)
    quarters = (relative * 4).long().clamp(max=3)
    shares = [(quarters == quarter).double().mean().item() for quarter in range(4)]
    return EntropySummary(
        head_means=tuple(tuple(row) for row in means.tolist()),
        num_collapsed=int((means < COLLAPSE_SHARE * math.log(seq_len)).sum()),
        quarter_shares=(shares[0], shares[1], shares[2], shares[3]),
    )
