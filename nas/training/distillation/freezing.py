"""Which norms are frozen after which step of a run: one after another, by the number of the step alone."""

from nas.model.decoder import Decoder
from nas.model.norms import frozen_norms
from nas.recipe.recipe import Freezing


def freeze_due(model: Decoder, settings: Freezing, *, step: int, num_steps: int) -> None:
    """Freezes the norms whose turn it is after step 1, 2, ... of num_steps; one that is frozen stays so."""
    norms = frozen_norms(model)
    for name, due in freezing_steps(list(norms), settings, num_steps).items():
        if step >= due and not norms[name].is_frozen:
            norms[name].set_frozen()


def freezing_steps(names: list[str], settings: Freezing, num_steps: int) -> dict[str, int]:
    """The step, from 1 to num_steps, after which each norm is frozen, in order and evenly spread."""
    ordered = sorted(names, key=_turn)
    spread = settings.end_share - settings.start_share
    shares = [settings.start_share + spread * place / max(1, len(ordered) - 1) for place in range(len(ordered))]
    return {name: max(1, round(share * num_steps)) for name, share in zip(ordered, shares, strict=True)}


def _turn(name: str) -> tuple[int, int]:
    """The norms before attention come first, from the first layer to the last; then those before FFNs; then the last.

    Of the orders tried, this one trained a proxy best; layer by layer, from either end, is as good within a percent.
    """
    if name == "final_norm":
        return 2, 0
    _, layer, norm = name.split(".")
    return int(norm == "norm2"), int(layer)
