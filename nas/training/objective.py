"""The loss of a recipe: cross-entropy, distillation from a parent, and the entropy penalty.

Hidden states after each layer carry much more information per token than predictions (docs/research-log.md has the
measurements behind the weights of both). Attention entropy also shows collapsed and overloaded heads (`summarise`).
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from costmodel.errors import UserError
from nas.attention.reference import row_bounds
from nas.model.bf16_products import bf16_products
from nas.model.cross_entropy import Runner, losses_of_chunk, projected_cross_entropy
from nas.model.decoder import build
from nas.model.weights import normalise
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import EntropyRegularisation
from nas.training.distillation.parts import train_parts
from nas.training.distillation.teacher import Lesson
from nas.training.outcome import EntropySummary
from search_spaces.architecture import num_heads

COLLAPSE_SHARE = 0.02  # of ln T: a head below it attends to one token, which can be useful, so it is only recorded


class Losses(NamedTuple):
    """Scalar losses of a batch, not multiplied by their weights, and without the error of hidden states.

    cross_entropy: mean over tokens, nats. penalty: of `EntropyPenalty`, nats^2; 0 if unused. distillation: KL(parent ||
        model), mean over tokens, nats; 0 if unused. From `forward`, the penalty has gradients; others may not.
    """

    cross_entropy: Tensor
    penalty: Tensor
    distillation: Tensor


class Objective(nn.Module):
    """Everything that is trained: the model and, with entropy regularisation, the thresholds of its heads.

    The model is built as the candidate's `initial_architecture`, with weights drawn from the generator.
    """

    def __init__(self, candidate: Candidate, generator: torch.Generator) -> None:
        super().__init__()
        recipe, architecture = candidate.recipe, candidate.initial_architecture
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
        self.loss_function: Runner = losses_of_chunk  # of a chunk of logits; may be compiled
        self.lowered = recipe.precision == "bfloat16"
        self.prediction_weight = 0.0 if distillation is None else distillation.prediction_weight
        self.hidden_state_weight = 0.0 if distillation is None else distillation.hidden_state_weight

    def forward(self, inputs: Tensor, targets: Tensor, lesson: Lesson | None = None) -> tuple[Tensor, Losses]:
        """Return the loss to differentiate, a weighted sum of all losses but the penalty, and the unweighted losses.

        inputs, targets: batch x T, int64. lesson: the parent's lesson for these inputs, needed for distillation.
        """
        hidden_states: list[Tensor] = []
        with bf16_products(inputs.device.type, enabled=self.lowered):
            stream, entropies = self.model.features(
                inputs, with_entropies=self.penalty is not None, hidden_states=hidden_states
            )
            hidden, weight, cap = stream.flatten(0, 1), self.model.logits.weight, self.model.architecture.logit_cap
            if self.prediction_weight:
                assert lesson is not None
                assert lesson.distilled is not None
                loss, *parts = lesson.distilled(
                    hidden, weight, targets.flatten(), share=self.prediction_weight, cap=cap, run=self.loss_function
                )
            else:
                loss = projected_cross_entropy(hidden, weight, targets.flatten(), cap, self.loss_function)
                parts = [loss, loss.new_zeros(())]
        if lesson is not None and lesson.hidden_state_error is not None:
            loss = loss + self.hidden_state_weight * lesson.hidden_state_error(hidden_states)
        cross_entropy, distillation = parts
        penalty = cross_entropy.new_zeros(()) if self.penalty is None else self.penalty(entropies)
        return loss, Losses(cross_entropy, penalty, distillation)

    def backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        num_parts: int,
        penalty_weight: float | Tensor,
        lessons: Iterable[Lesson] | None = None,
    ) -> Losses:
        """Add a batch's gradients to those of the parameters, in `num_parts` equal parts; return the batch's losses.

        penalty_weight: weight of the penalty in the gradients. lessons: one per part, as in `forward`.
        """
        adds_up = self.penalty is not None and self.penalty.settings.form == "published-code"
        penalty_share = 1.0 if adds_up else 1 / num_parts
        total = torch.zeros(3, dtype=torch.float64, device=inputs.device)
        taught = [None] * num_parts if lessons is None else lessons
        for part in zip(inputs.chunk(num_parts), targets.chunk(num_parts), taught, strict=True):
            loss, losses = self(*part)
            torch.autograd.backward(loss * (1 / num_parts) + penalty_weight * (losses.penalty * penalty_share))
            shares = (1 / num_parts, penalty_share, 1 / num_parts)
            total += torch.stack([value.detach() * share for value, share in zip(losses, shares, strict=True)])
        return Losses(*total)


class EntropyPenalty(nn.Module):
    """The entropy regulariser of all layers and heads, with its learned thresholds (layers x heads, shares of E_max).

    num_heads: the largest number of heads of a layer; thresholds of missing heads do not change. With the deviation
    d = E - threshold * E_max of an entropy E, the penalty is d^2 where |d| > margin * E_max, else 0; the regulariser's
    weight is not included.

    Source: arXiv 2501.03489, Algorithm 1.
    """

    def __init__(self, settings: EntropyRegularisation, *, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.settings = settings
        self.thresholds = nn.Parameter(torch.full((num_layers, num_heads), settings.threshold_init))

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        """Return the scalar penalty; without heads, 0. layers: row entropies in nats, batch x heads x T per layer."""
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
    """Summarise the entropies of all heads. head_means: mean entropy in nats of each head, a tensor per layer.

    seq_len: tokens per sequence. Raises UserError if an entropy is not finite.
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
