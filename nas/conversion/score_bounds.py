"""Bounds of bounded softmaxes, from the scores that a model has on tokens.

The sum over a row of exp(score - bound) must be neither so large nor so small that fixed point loses it. The middle
between the largest and the least of a head's rows, each in logarithms, is the bound that most can lie around.
"""

from typing import Any

import torch
from torch import Tensor

from nas.attention.causal import Attended, log_sums
from nas.model.decoder import Decoder


@torch.no_grad()
def set_bounds(model: Decoder, tokens: Tensor) -> None:
    """Sets the bound of every head of a bounded softmax; of a model without one, nothing. tokens: sequences x T."""
    observers = [
        _Observer(layer.attention) for layer in model.layers if getattr(layer.attention, "bound", None) is not None
    ]
    for sequence in tokens if observers else ():
        model.features(sequence[None], with_entropies=False)
    for observer in observers:
        observer.leave()


class _Observer:
    """Stands in for what an attention attends by, and sees the largest and the least row of each head, in logs."""

    def __init__(self, attention: Any) -> None:
        self.attention, self.attend = attention, attention.attend
        self.least, self.largest = torch.tensor(torch.inf), torch.tensor(-torch.inf)  # then a number for each head
        attention.attend = self

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, **settings: Any) -> Attended:
        sums = log_sums(queries, keys, settings["temperature"]).transpose(0, 1).flatten(1)  # heads x rows
        self.least, self.largest = (
            torch.minimum(sums.amin(dim=1), self.least),
            torch.maximum(sums.amax(dim=1), self.largest),
        )
        attended: Attended = self.attend(queries, keys, values, **settings)
        return attended

    def leave(self) -> None:
        self.attention.attend = self.attend
        self.attention.bound.weight.copy_((self.least + self.largest) / 2)
