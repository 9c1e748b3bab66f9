"""Measurements inside a model in training, twenty times a run: entropies, NaNs, gradients, learned scalars.

It costs one more forward pass of one micro-batch each time; nothing of it changes what is trained.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nas.recipe.recipe import Scale
from nas.training.entropy import EntropyPenalty, summarise
from nas.training.objective import Objective

NUM_DIAGNOSES = 20  # a run
# Ends of the names of learned scalars: alpha and beta, slopes of leaky ReLUs, gains of He and Hofmann's attention.
SCALARS = (".alpha", ".beta", ".slope", ".identity", ".softmax", ".uniform")


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """A model just before step `step`'s weights change, on the step's first micro-batch. None stands for no number.

    head_entropies: of each layer its heads', nats, mean over rows and sequences.
    quarter_shares, flags: as in `EntropySummary`, or None and no flags where an entropy is not finite.
    num_nan: attention rows of each layer whose entropy is not a number.
    gradient_norms: of the step's whole gradient, before clipping, by layer and part of the model.
    thresholds: of each layer's heads, the regulariser's, shares of E_max; None without it.
    temperatures: geometric mean over positions of every head, by layer; empty without them.
    scalars: every learned scalar by name, one number per head where it has one.
    """

    step: int
    head_entropies: list[list[float | None]]
    quarter_shares: tuple[float, float, float, float] | None
    flags: tuple[str, ...]
    num_nan: list[int]
    gradient_norms: dict[str, float | None]
    thresholds: list[list[float]] | None
    temperatures: dict[str, list[float]]
    scalars: dict[str, list[float]]


def is_due(step: int, scale: Scale) -> bool:
    """Whether step 1, 2, ... of a run is one to look at; the last one is."""
    return step * NUM_DIAGNOSES // scale.num_steps > (step - 1) * NUM_DIAGNOSES // scale.num_steps


@torch.no_grad()
def diagnose(objective: Objective, inputs: Tensor, *, step: int) -> Diagnosis:
    """inputs: batch x T, tokens. Gradients are those that the objective holds."""
    model, penalty = objective.model, objective.penalty
    _, entropies = model.features(inputs, with_entropies=True)  # no logits, which are the largest tensor of all
    assert entropies is not None
    rows = [layer.double() for layer in entropies]  # each batch x heads x T
    head_means = [layer.mean(dim=(0, 2)) for layer in rows]
    summary = summarise(head_means, inputs.shape[1]) if torch.cat(head_means).isfinite().all() else None
    learned = dict(model.named_parameters())
    return Diagnosis(
        step=step,
        head_entropies=[[_finite(mean) for mean in layer.tolist()] for layer in head_means],
        quarter_shares=summary.quarter_shares if summary else None,
        flags=summary.flags if summary else (),
        num_nan=[int(layer.isnan().sum()) for layer in rows],
        gradient_norms=_gradient_norms(objective),
        thresholds=None if penalty is None else _thresholds(penalty, head_means),
        temperatures={
            name.removesuffix(".attention.temperature.log_weight"): log_weight.mean(dim=1).exp().tolist()
            for name, log_weight in learned.items()
            if name.endswith(".temperature.log_weight")
        },
        scalars={name: value.flatten().tolist() for name, value in learned.items() if name.endswith(SCALARS)},
    )


def _thresholds(penalty: EntropyPenalty, head_means: Sequence[Tensor]) -> list[list[float]]:
    """Thresholds of the heads that there are."""
    return [row[: len(means)] for row, means in zip(penalty.thresholds.tolist(), head_means, strict=True)]


def _gradient_norms(objective: nn.Module) -> dict[str, float | None]:
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in objective.named_parameters():
        if parameter.grad is not None:
            place = name.removeprefix("model.").split(".")
            parts[".".join(place[:2]) if place[0] == "layers" else place[0]].append(parameter.grad)
    return {part: _finite(nn.utils.get_total_norm(gradients).item()) for part, gradients in parts.items()}


def _finite(number: float) -> float | None:
    """JSON has no place for the others."""
    return number if math.isfinite(number) else None
