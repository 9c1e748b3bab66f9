"""The user's changes to a recipe, as dataclasses and flags `--recipe.*`. A field of None means no change."""

import sys
from argparse import SUPPRESS, Action
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass, make_dataclass, replace
from textwrap import fill, indent
from typing import Any, get_type_hints

from costmodel.config import cli
from costmodel.errors import UserError
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.recipe import EntropyRegularisation, Foldable, Freezing, Recipe, Scale


def _changes(kind: type, *names: str, **parts: type) -> Any:
    """Make a dataclass with some or all fields of another and their descriptions, optional and None by default.

    parts: fields with a dataclass of changes of their own.
    """
    hints = get_type_hints(kind)
    stated = [(field.name, hints[field.name] | None, None) for field in fields(kind) if field.name in (names or hints)]
    within = [(name, part, part()) for name, part in parts.items()]
    return make_dataclass(
        kind.__name__, [*within, *stated], frozen=True, kw_only=True, namespace={"__doc__": kind.__doc__}
    )


_OF_SCALE = ("head_dim", "vocab_size", "batch", "micro_batch", "learning_rate", "warmup_share", "validation_tokens")
_OF_DISTILLATION = (
    *("start_share", "end_share", "prediction_weight", "spread_over_depth", "teacher_top_k", "trainable"),
    *("blockwise_tokens", "hidden_state_weight"),
)
_OF_RECIPE = (
    *("optimizer", "schedule", "final_rate_share", "beta1", "beta2", "eps", "weight_decay", "clip_norm"),
    *("temperature_init", "precision", "recompute", "compile"),
)


class ScaleChanges(_changes(Scale, *_OF_SCALE)):  # type: ignore[misc]
    """Changes to the scale."""


class EntropyChanges(_changes(EntropyRegularisation)):  # type: ignore[misc]
    """Changes to the entropy regulariser of an EReg candidate."""


class FoldableChanges(_changes(Foldable)):  # type: ignore[misc]
    """Changes to how linear FFNs are kept foldable; setting either option turns this on."""


class FreezingChanges(_changes(Freezing)):  # type: ignore[misc]
    """Changes to when norms are frozen, one after another."""


class DistillationChanges(_changes(DistillationSchedule, *_OF_DISTILLATION)):  # type: ignore[misc]
    """Changes to the distillation schedule from a parent."""


_PARTS = {
    "scale": ScaleChanges,
    "entropy": EntropyChanges,
    "foldable": FoldableChanges,
    "freezing": FreezingChanges,
    "distillation": DistillationChanges,
}


class RecipeChanges(_changes(Recipe, *_OF_RECIPE, **_PARTS)):  # type: ignore[misc]
    """Changes to how a candidate is trained."""


def add_recipe_flags(parser: cli.Parser, skip: Collection[str] = ()) -> None:
    """Add a flag `--recipe.*` for every change. The command's help names only `--recipe.help`, which lists the flags.

    skip: names of scale settings that get no flag.
    """
    parser.add_class_arguments(RecipeChanges, "recipe", skip=set(_PARTS))
    for name, part in _PARTS.items():
        parser.add_class_arguments(part, f"recipe.{name}", skip=set(skip) if name == "scale" else set())
    lines = ["Without a flag, a part has the value of the recipe for --scale, --data and the parent."]
    groups = {f"recipe.{name}" for name in _PARTS}
    for action in parser._actions:
        if action.dest.split(".")[0] == "recipe":
            if "." in action.dest and action.dest not in groups and action.help != SUPPRESS:
                name = action.dest.replace("_", "-")
                lines.append(f"  --{name} VALUE\n{indent(fill(str(action.help), 100), ' ' * 8)}")
            action.help = SUPPRESS
    parser.add_argument("--recipe.help", action=_RecipeHelp, text="\n".join(lines))


class _RecipeHelp(Action):
    def __init__(self, option_strings: Sequence[str], text: str = "", **rest: Any) -> None:
        help = "list the flags --recipe.KEY VALUE, each of which changes one part of the recipe, and exit"
        super().__init__(option_strings, dest=SUPPRESS, default=SUPPRESS, nargs=0, help=help)
        self.text = text

    def __call__(self, *args: Any, **rest: Any) -> None:
        print(self.text)
        sys.exit(0)


def changed(recipe: Recipe, changes: RecipeChanges) -> Recipe:
    """Return the recipe with these changes.

    Raises UserError for values that `Recipe` or a part of it refuses, changes of an entropy regulariser or a
    distillation schedule that the recipe does not have, or form `published-code` of the regulariser without a weight.
    """
    if recipe.entropy is None and _stated(changes.entropy):
        names = ", ".join(_stated(changes.entropy))
        raise UserError(f"changes of the regulariser ({names}) need an architecture named EReg(...).")
    if changes.entropy.form == "published-code" and changes.entropy.weight is None:
        raise UserError(
            "form=published-code needs a weight of its own, such as the papers' 1e-5, since it adds up over rows and "
            "sequences; state --recipe.entropy.weight."
        )
    if recipe.distillation is None and _stated(changes.distillation):
        raise UserError(
            f"changes of the distillation schedule ({', '.join(_stated(changes.distillation))}) need a parent; name it."
        )
    stated = _stated(changes.foldable)
    return replace(
        recipe,
        scale=replace(recipe.scale, **_stated(changes.scale)),
        entropy=recipe.entropy and replace(recipe.entropy, **_stated(changes.entropy)),
        freezing=replace(recipe.freezing, **_stated(changes.freezing)),
        distillation=recipe.distillation and replace(recipe.distillation, **_stated(changes.distillation)),
        foldable=replace(recipe.foldable or Foldable(), **stated) if stated else recipe.foldable,
        **_stated(changes),
    )


def _stated(changes: Any) -> dict[str, Any]:
    values = {field.name: getattr(changes, field.name) for field in fields(changes)}
    return {name: value for name, value in values.items() if value is not None and not is_dataclass(value)}
