"""The default device of a training, and the precision of products on a device."""

import logging
from dataclasses import replace
from typing import Literal

import torch

from nas.recipe.candidate import Candidate
from nas.recipe.overrides import RecipeChanges

_log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
UNCHANGED = RecipeChanges()


def usual_device() -> Device:
    """Return cuda if torch can use a GPU, else cpu."""
    return "cuda" if torch.cuda.device_count() else "cpu"


def on_device(changes: RecipeChanges, device: str) -> RecipeChanges:
    """Set the precision of a new training, so that it stays the same when the training is resumed elsewhere.

    On a GPU the default is bfloat16 products, with weights, sums and loss in float32. A GPU without bfloat16 units
    trains in float32 instead, which is logged. On a CPU nothing changes.
    """
    if torch.device(device).type == "cpu" or changes.precision not in (None, "bfloat16"):
        return changes
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        _log.info(f"{torch.cuda.get_device_name()} is too old for bfloat16 products; training in float32 instead")
        return replace(changes, precision="float32")
    return replace(changes, precision="bfloat16")


def lowered(candidate: Candidate, device: str, changes: RecipeChanges = UNCHANGED) -> Candidate:
    """Return a candidate in the precision that it has on a device. changes: requested changes of its recipe."""
    precision = on_device(changes, device).precision
    recipe = candidate.recipe if precision is None else replace(candidate.recipe, precision=precision)
    return replace(candidate, recipe=recipe)


def log_another(began_on: str | None, device: str) -> None:
    """Log that a training continues on another kind of device than its last checkpoint's. began_on: None if unknown."""
    if began_on not in (None, kind := torch.device(device).type):
        _log.warning(
            f"the checkpoint was written on {began_on} and training continues on {kind}; from here on, its numbers "
            f"differ by more than rounding from those of a training on one device"
        )
