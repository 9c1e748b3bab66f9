"""When norms are frozen in training: one after another, in order of execution, attention's before those of FFNs."""

from torch import nn

from nas.model.norms import frozen_norms
from nas.recipe.recipe import Freezing


def freeze_due(model: nn.Module, settings: Freezing, *, step: int, num_steps: int) -> None:
    """Freeze the norms that are due after step 1, 2, ... of num_steps; frozen ones stay frozen."""
    norms = frozen_norms(model)
    for name, due in freezing_steps(list(norms), settings, num_steps).items():
        if step >= due and not norms[name].is_frozen:
            norms[name].set_frozen()


def freezing_steps(names: list[str], settings: Freezing, num_steps: int) -> dict[str, int]:
    """Return the step, from 1 to num_steps, after which each norm is frozen, in order and evenly spread."""
    ordered = sorted(names, key=_turn)
    spread = settings.end_share - settings.start_share
    shares = [settings.start_share + spread * place / max(1, len(ordered) - 1) for place in range(len(ordered))]
    return {name: max(1, round(share * num_steps)) for name, share in zip(ordered, shares, strict=True)}


def _turn(name: str) -> tuple[int, int]:
    """Return the sort key of a norm: attention's by layer, then those of FFNs, then the final one.

    Of the orders tried, this one trained a proxy best; layer by layer, from either end, is as good within a percent.
    """
    if name == "final_norm":
        return 2, 0
    _, layer, part, *_ = name.split(".")
    return int(part in ("norm2", "ffn")), int(layer)
