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
    import os

    order = os.environ.get("FREEZE_ORDER", "a")
    if name == "final_norm":
        return (10**6, 0)
    _, index, norm = name.split(".")
    i, second = int(index), norm == "norm2"
    return {
        "a": (i, int(second)),  # input to output
        "b": (-i, int(not second)),  # output to input
        "c": (int(not second), i),  # all norm2, then norm1
        "d": (int(second), i),  # all norm1, then norm2
        "e": (int(not second), -i),
        "f": (int(second), -i),
    }[order]
