"""The loss of a recipe: cross-entropy, distillation from a parent, and the entropy penalty.

Distillation compares predictions and, with a weight, the hidden states after each layer, which carry much more
information per token. docs/research-log.md compares weights.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from nas.model.cross_entropy import distilled, projected_cross_entropy
from nas.model.decoder import build
from nas.model.weight_normalisation import normalise
from nas.recipe.candidate import Candidate
from nas.training.distillation.parts import train_parts
from nas.training.distillation.teacher import Predictions
from nas.training.entropy import EntropyPenalty
from search_spaces.architecture import num_heads

StreamError: TypeAlias = Callable[[Sequence[Tensor]], Tensor]  # of a model's hidden states


class Losses(NamedTuple):
    """Losses of a batch, without their weights.

    cross_entropy: mean over tokens, nats. penalty: of attention entropies. distillation: KL(parent || model), mean over
        tokens, nats.
    """

    cross_entropy: Tensor
    penalty: Tensor
    distillation: Tensor


class Objective(nn.Module):
    """Everything that is trained: the model and, with entropy regularisation, its thresholds.

    With a distillation schedule, the model begins as its `initial_architecture`.
    """

    def __init__(self, candidate: Candidate, generator: torch.Generator) -> None:
        super().__init__()
        recipe = candidate.recipe
        architecture = candidate.initial_architecture
        self.model = build(architecture, generator, temperature_init=recipe.temperature_init, slopes=recipe.slopes)
        if recipe.normalisation is not None:
            normalise(self.model, recipe.normalisation, generator)
        if (distillation := recipe.distillation) is not None:
            train_parts(self.model, candidate.trained, distillation)
        self.model.recompute = recipe.recompute
        self.penalty: EntropyPenalty | None = None
        most_heads = max(
            0 if layer.attention == "none" else num_heads(architecture, layer) for layer in architecture.layers
        )
        if recipe.entropy is not None and most_heads:  # there is nothing to regularise without attention
            self.penalty = EntropyPenalty(recipe.entropy, num_layers=architecture.num_layers, num_heads=most_heads)
        self.lowered = recipe.precision == "bfloat16"
        self.prediction_weight = 0.0 if distillation is None else distillation.prediction_weight
        self.hidden_state_weight = 0.0 if distillation is None else distillation.hidden_state_weight

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        predictions: Predictions | None = None,
        hidden_state_error: StreamError | None = None,
    ) -> tuple[Tensor, Losses]:
        """Return the loss to be differentiated, without the penalty, and all losses.

        inputs, targets: batch x T. predictions: the parent's, needed for distillation. hidden_state_error: distance of
            these inputs' hidden states from the parent's (`Teacher.hidden_state_error`).
        """
        hidden_states: list[Tensor] = []
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self.lowered):
            stream, entropies = self.model.features(
                inputs, with_entropies=self.penalty is not None, hidden_states=hidden_states
            )
            hidden, weight, cap = stream.flatten(0, 1), self.model.logits.weight, self.model.architecture.logit_cap
            if self.prediction_weight:
                assert predictions is not None
                likely, log_probabilities = (part.flatten(0, 1) for part in predictions)
                loss, *parts = distilled(
                    hidden, weight, targets.flatten(), likely, log_probabilities, self.prediction_weight, cap
                )
            else:
                loss = projected_cross_entropy(hidden, weight, targets.flatten(), cap)
                parts = [loss, loss.new_zeros(())]
        if self.hidden_state_weight and hidden_state_error is not None:
            loss = loss + self.hidden_state_weight * hidden_state_error(hidden_states)
        cross_entropy, distillation = parts
        penalty = cross_entropy.new_zeros(()) if self.penalty is None else self.penalty(entropies)
        return loss, Losses(cross_entropy, penalty, distillation)

    def backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        num_parts: int,
        penalty_weight: float,
        predictions: Predictions | None = None,
        stream_errors: Sequence[StreamError] = (),
    ) -> Losses:
        """Compute gradients and losses of a batch in equal parts, so that only one part is in memory.

        predictions: as in `forward`, of the batch. stream_errors: one per part, or none.
        """
        penalty_share = 1.0 if self.penalty is not None and self.penalty.adds_up else 1 / num_parts
        total = torch.zeros(3, dtype=torch.float64, device=inputs.device)
        taught = [None] * num_parts if predictions is None else _chunks(predictions, num_parts)
        errors: Sequence[StreamError | None] = stream_errors or [None] * num_parts
        for part in zip(inputs.chunk(num_parts), targets.chunk(num_parts), taught, errors, strict=True):
            loss, losses = self(*part)
            torch.autograd.backward(loss * (1 / num_parts) + penalty_weight * (losses.penalty * penalty_share))
            shares = (1 / num_parts, penalty_share, 1 / num_parts)
            total += torch.stack([value.detach() * share for value, share in zip(losses, shares, strict=True)])
        return Losses(*total)


def _chunks(predictions: Predictions, num_parts: int) -> list[Predictions]:
    return [Predictions(*parts) for parts in zip(*(part.chunk(num_parts) for part in predictions), strict=True)]
