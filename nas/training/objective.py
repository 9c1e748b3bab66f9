"""The loss: cross-entropy, distillation from a parent and the entropy penalty, as the recipe says.

Distillation compares predictions and, with a weight, the streams between layers, which say far more of each token. From
the builtin parent, seed 0, nats by that weight (0, 10, 30, 100), above after 65,536 tokens, below after 327,680:

    1xLSLGo-11xLSLBo         2.287  2.169  2.142
    SM+ScFuFFN               2.907  2.832  2.865
    2xlSlRo-6xlHlRo-4xoolRo  2.531  2.454  2.461

    10xoSoRo-2xooooo                                     2.065  2.042  2.049  2.064
    7xoSoRo-5xooooo                                      2.187  2.146  2.157  2.181
    1xoooRo-3xoHooo-2xoHoRo-4xoToRo-2xLTLRo              2.029  2.000  2.002  2.006
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

StreamError: TypeAlias = Callable[[Sequence[Tensor]], Tensor]  # of a model's streams


class Losses(NamedTuple):
    """Losses of a batch, before their weights.

    cross_entropy: mean over tokens, in nats. penalty: of attention entropies.
    distillation: divergence of the model from its parent, KL(parent || model), mean over tokens, in nats.
    """

    cross_entropy: Tensor
    penalty: Tensor
    distillation: Tensor


class Objective(nn.Module):
    """Everything the optimizer moves: the model and, with entropy regularisation, its thresholds.

    With a distillation schedule the model begins as its `initial_architecture`.
    """

    def __init__(self, candidate: Candidate, generator: torch.Generator) -> None:
        super().__init__()
        recipe = candidate.recipe
        architecture = candidate.initial_architecture
        self.model = build(architecture, generator, temperature_init=recipe.temperature_init, slopes=recipe.slopes)
        if recipe.normalisation is not None:
            normalise(self.model, recipe.normalisation, generator)
        if (route := recipe.route) is not None:
            train_parts(self.model, candidate.trained, route)
        self.model.recompute = recipe.recompute
        self.penalty: EntropyPenalty | None = None
        most_heads = max(
            0 if layer.attention == "none" else num_heads(architecture, layer) for layer in architecture.layers
        )
        if recipe.entropy is not None and most_heads:  # without any attention there is nothing to regularise
            self.penalty = EntropyPenalty(recipe.entropy, num_layers=architecture.num_layers, num_heads=most_heads)
        self.lowered = recipe.precision == "bfloat16"
        self.distillation = 0.0 if route is None else route.distillation
        self.streams = 0.0 if route is None else route.streams

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        predictions: Predictions | None = None,
        stream_error: StreamError | None = None,
    ) -> tuple[Tensor, Losses]:
        """What of the loss compares predictions and streams, to be differentiated with the penalty; and the losses.

        inputs, targets: batch x T. predictions: the parent's, which distillation needs. stream_error: how far streams
        of these inputs are from the parent's (`Teacher.stream_error`).
        """
        streams: list[Tensor] = []
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self.lowered):
            stream, entropies = self.model.features(inputs, with_entropies=self.penalty is not None, streams=streams)
            hidden, weight, cap = stream.flatten(0, 1), self.model.logits.weight, self.model.architecture.logit_cap
            if self.distillation:
                assert predictions is not None
                likely, log_probabilities = (part.flatten(0, 1) for part in predictions)
                loss, *parts = distilled(
                    hidden, weight, targets.flatten(), likely, log_probabilities, self.distillation, cap
                )
            else:
                loss = projected_cross_entropy(hidden, weight, targets.flatten(), cap)
                parts = [loss, loss.new_zeros(())]
        if self.streams and stream_error is not None:
            loss = loss + self.streams * stream_error(streams)
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
        """Gradients and losses of a batch, computed in equal parts so that memory holds one part only.

        predictions: as `forward` has them, of the batch. stream_errors: of each part, or none.
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
