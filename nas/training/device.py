"""The default device of a training, and the precision of products on a device."""

import logging
from dataclasses import replace
from typing import Literal

import torch

from nas.model.bf16_products import has_matrix_units
from nas.recipe.candidate import Candidate
from nas.recipe.overrides import RecipeChanges
from nas.recipe.recipe import SMALL_SCALES, Precision, ScaleName

_log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
UNCHANGED = RecipeChanges()


def usual_device() -> Device:
    """Return cuda if torch can use a GPU, else cpu."""
    return "cuda" if torch.cuda.device_count() else "cpu"


def on_device(changes: RecipeChanges, device: str, scale: ScaleName) -> RecipeChanges:
    """Set the precision of a new training, so that it stays the same when the training is resumed elsewhere.

    The default is bfloat16 products, with weights, sums and loss in float32, on a GPU and, at scales of real models, on
    a CPU with matrix units. A GPU without bfloat16 units trains in float32 instead. Each choice on a CPU is logged.
    """
    if changes.precision not in (None, "bfloat16"):
        return changes
    if torch.device(device).type == "cpu":
        if changes.precision is None and scale not in SMALL_SCALES and has_matrix_units():
            _log.info(
                "on the CPU, products are in bfloat16, which its matrix units multiply several times as fast as "
                "float32; --recipe.precision float32 overrides this"
            )
            return replace(changes, precision="bfloat16")
        if changes.precision is not None and not has_matrix_units():
            _log.warning("this CPU has no matrix units for bfloat16 products; they are slower than float32 here")
        return changes
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        _log.info(f"{torch.cuda.get_device_name()} is too old for bfloat16 products; training in float32 instead")
        return replace(changes, precision="float32")
    return replace(changes, precision="bfloat16")


def lowered(candidate: Candidate, device: str, changes: RecipeChanges = UNCHANGED) -> Candidate:
    """Return a candidate in the precision that it has on a device. changes: requested changes of its recipe."""
    precision = on_device(changes, device, candidate.recipe.scale.name).precision
    recipe = candidate.recipe if precision is None else replace(candidate.recipe, precision=precision)
    return replace(candidate, recipe=recipe)


def kind_of(device: str, precision: Precision) -> str:
    """Return the kind of a device; between kinds, the numbers of a training differ by more than float32's rounding."""
    kind = torch.device(device).type
    return f"{kind} with matrix units" if kind == "cpu" and precision == "bfloat16" and has_matrix_units() else kind


def log_another(began_on: str | None, kind: str) -> None:
    """Log that a training continues on another kind of device than its last checkpoint's. began_on: None if unknown."""
    if began_on not in (None, kind):
        _log.warning(
            f"the checkpoint was written on {began_on} and training continues on {kind}; from here on, its numbers "
            f"differ by more than rounding from those of a training on one device"
        )
