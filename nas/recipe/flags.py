"""The flags `--recipe.*` of the commands that train."""

from collections.abc import Collection

from costmodel.config import cli
from nas.recipe.overrides import (
    DistillationChanges,
    EntropyChanges,
    FoldableChanges,
    FreezingChanges,
    RecipeChanges,
    ScaleChanges,
)

RECIPE_PARTS: dict[str, type] = {
    "entropy": EntropyChanges,
    "foldable": FoldableChanges,
    "freezing": FreezingChanges,
    "route": DistillationChanges,
}


def add_recipe_flags(parser: cli.Parser, skip: Collection[str] = ()) -> None:
    """A flag for every change. skip: of those of the scale."""
    parser.add_class_arguments(RecipeChanges, "recipe", skip={"scale", *RECIPE_PARTS})
    parser.add_class_arguments(ScaleChanges, "recipe.scale", skip=set(skip))
    for name, part in RECIPE_PARTS.items():
        parser.add_class_arguments(part, f"recipe.{name}")
