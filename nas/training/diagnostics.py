"""Measurements inside a model during training, twenty per run: entropies, NaNs, gradients, learned scalars.

Each costs one more forward pass of a micro-batch, and does not change the training.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nas.recipe.recipe import Scale
from nas.training.entropy import summarise
from nas.training.objective import Objective

NUM_DIAGNOSES = 20  # per run
# Suffixes of learned scalars: alpha and beta, slopes of leaky ReLUs, gains of He and Hofmann's attention.
SCALARS = (".alpha", ".beta", ".slope", ".identity", ".softmax", ".uniform")


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The state of a model before the update of `step`, on its first micro-batch. None stands for non-finite numbers.

    Attributes:
        head_entropies: by layer and head, nats, mean over rows and sequences.
        quarter_shares, flags: as in `EntropySummary`; None and empty if an entropy is not finite.
        num_nan: attention rows of each layer whose entropy is NaN.
        gradient_norms: norms of the whole gradient before clipping, by layer and part of the model.
        thresholds: the regulariser's, by layer and head, as shares of E_max; None without it.
        temperatures: by layer, geometric mean over positions for every head; empty without them.
        scalars: every learned scalar by name, with one number per head if there are several.
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
    """Whether step 1, 2, ... of a run is diagnosed; the last one is."""
    return step * NUM_DIAGNOSES // scale.num_steps > (step - 1) * NUM_DIAGNOSES // scale.num_steps


@torch.no_grad()
def diagnose(objective: Objective, inputs: Tensor, *, step: int) -> Diagnosis:
    """Diagnose the model on inputs (tokens, batch x T) with its present gradients."""
    model, penalty = objective.model, objective.penalty
    _, entropies = model.features(inputs, with_entropies=True)  # without logits, which would be the largest tensor
    assert entropies is not None
    rows = [layer.double() for layer in entropies]  # each batch x heads x T
    head_means = [layer.mean(dim=(0, 2)) for layer in rows]
    summary = summarise(head_means, inputs.shape[1]) if torch.cat(head_means).isfinite().all() else None
    thresholds = None
    if penalty is not None:
        thresholds = [row[: len(means)] for row, means in zip(penalty.thresholds.tolist(), head_means, strict=True)]
    learned = dict(model.named_parameters())
    return Diagnosis(
        step=step,
        head_entropies=[[_finite(mean) for mean in layer.tolist()] for layer in head_means],
        quarter_shares=summary.quarter_shares if summary else None,
        flags=summary.flags if summary else (),
        num_nan=[int(layer.isnan().sum()) for layer in rows],
        gradient_norms=_gradient_norms(objective),
        thresholds=thresholds,
        temperatures={
            name.removesuffix(".attention.temperature.log_weight"): log_weight.mean(dim=1).exp().tolist()
            for name, log_weight in learned.items()
            if name.endswith(".temperature.log_weight")
        },
        scalars={name: value.flatten().tolist() for name, value in learned.items() if name.endswith(SCALARS)},
    )


def _gradient_norms(objective: nn.Module) -> dict[str, float | None]:
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in objective.named_parameters():
        if parameter.grad is not None:
            place = name.removeprefix("model.").split(".")
            parts[".".join(place[:2]) if place[0] == "layers" else place[0]].append(parameter.grad)
    return {part: _finite(nn.utils.get_total_norm(gradients).item()) for part, gradients in parts.items()}


def _finite(number: float) -> float | None:
    """Return the number, or None if JSON cannot represent it."""
    return number if math.isfinite(number) else None
