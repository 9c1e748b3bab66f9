"""What is minimised: cross-entropy plus, if the recipe says so, the weighted entropy penalty."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nas.model.cross_entropy import projected_cross_entropy
from nas.model.decoder import build
from nas.model.weight_normalisation import normalise
from nas.recipe.candidate import Candidate
from nas.training.entropy import EntropyPenalty
from search_spaces.architecture import num_heads


class Losses(NamedTuple):
    """Losses of a batch: mean cross-entropy in nats per token, and the penalty before its weight."""

    cross_entropy: Tensor
    penalty: Tensor


class Objective(nn.Module):
    """Everything the optimizer moves: the model and, with entropy regularisation, its thresholds."""

    def __init__(self, candidate: Candidate, generator: torch.Generator) -> None:
        super().__init__()
        architecture, recipe = candidate.trained, candidate.recipe
        self.model = build(architecture, generator, temperature_init=recipe.temperature_init, slopes=recipe.slopes)
        if recipe.normalisation is not None:
            normalise(self.model, recipe.normalisation, generator)
        self.penalty: EntropyPenalty | None = None
        most_heads = max(
            0 if layer.attention == "none" else num_heads(architecture, layer) for layer in architecture.layers
        )
        if recipe.entropy is not None and most_heads:  # without any attention there is nothing to regularise
            self.penalty = EntropyPenalty(recipe.entropy, num_layers=architecture.num_layers, num_heads=most_heads)
        self.lowered = recipe.precision == "bfloat16"

    def forward(self, inputs: Tensor, targets: Tensor) -> Losses:
        """inputs, targets: batch x T."""
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self.lowered):
            stream, entropies = self.model.features(inputs, with_entropies=self.penalty is not None)
            cross_entropy = projected_cross_entropy(stream.flatten(0, 1), self.model.logits.weight, targets.flatten())
        return Losses(cross_entropy, cross_entropy.new_zeros(()) if self.penalty is None else self.penalty(entropies))

    def backward(self, inputs: Tensor, targets: Tensor, *, num_parts: int, penalty_weight: float) -> Losses:
        """Gradients and losses of a batch, computed in equal parts so that memory holds one part only."""
        penalty_share = 1.0 if self.penalty is not None and self.penalty.adds_up else 1 / num_parts
        total = torch.zeros(2, dtype=torch.float64, device=inputs.device)
        for part in zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True):
            cross_entropy, penalty = self(*part)
            scaled = torch.stack((cross_entropy / num_parts, penalty * penalty_share))
            torch.autograd.backward(scaled[0] + penalty_weight * scaled[1])
            total += scaled.detach()
        return Losses(*total)
