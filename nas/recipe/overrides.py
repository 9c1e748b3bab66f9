"""Changes of a user to the recipe that a scale and its data come with. Nothing stated, nothing changed."""

import sys
from argparse import SUPPRESS, Action
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from textwrap import fill, indent
from typing import Any, TypeAlias

from costmodel.config import cli
from costmodel.errors import UserError
from nas.recipe.distillation import Trainable
from nas.recipe.recipe import EntropyMaximum, Foldable, OptimizerName, PenaltyForm, Precision, RateSchedule, Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleChanges:
    """Changes to the scale.

    Args:
        head_dim: features per head of the trained model.
        vocab_size: entries of the tokenizer.
        batch: sequences per optimizer step.
        micro_batch: sequences per forward pass, a divisor of it; fewer need less memory.
        learning_rate: its peak.
        warmup_share: share of the steps before the peak.
        validation_tokens: at most this many.
    """

    head_dim: int | None = None
    vocab_size: int | None = None
    batch: int | None = None
    micro_batch: int | None = None
    learning_rate: float | None = None
    warmup_share: float | None = None
    validation_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyChanges:
    """Changes to the entropy regulariser of an EReg candidate.

    Args:
        form: mean (Algorithm 1 of the paper) or published-code, which sums over rows and sequences.
        maximum: ln-t, or causal, what each row can reach.
        weight: factor of the penalty in the loss.
        warmup_share: share of the steps over which the weight rises to that.
        margin: half the width of the band that is not penalised, in units of the largest entropy.
        threshold_init: its centre at the start.
    """

    form: PenaltyForm | None = None
    maximum: EntropyMaximum | None = None
    weight: float | None = None
    warmup_share: float | None = None
    margin: float | None = None
    threshold_init: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldableChanges:
    """Has linear FFNs that fold away kept foldable; stating either turns it on.

    Args:
        floor: smallest singular value of a layer's map of the residual stream; without an FFN all are 1.
        every: so many optimizer steps.
    """

    floor: float | None = None
    every: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezingChanges:
    """When norms are frozen that an architecture has frozen, one after another.

    Args:
        start_share: share of the steps before the first.
        end_share: share of the steps before the last.
    """

    start_share: float | None = None
    end_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationChanges:
    """Changes to the distillation schedule from a parent.

    Args:
        start_share: share of the steps before attention, FFNs and nonlinearities that go begin to.
        end_share: share of the steps before they have gone.
        distillation: share of the parent's predictions in what the loss compares with.
        spread: whether layers before a tail of empty ones start as the parent's evenly over its depth, or as its first.
        most_likely: tokens of each of the parent's predictions that are kept.
        trainable: all of the model, what is changed, or with that its neighbours.
        blockwise_tokens: over which each sub-layer that is not the parent's is trained by itself first; 0 for none.
        streams: weight of how far what each layer leaves is from what the parent's does, beside the predictions.
    """

    start_share: float | None = None
    end_share: float | None = None
    distillation: float | None = None
    spread: bool | None = None
    most_likely: int | None = None
    trainable: Trainable | None = None
    blockwise_tokens: int | None = None
    streams: float | None = None


Changes: TypeAlias = ScaleChanges | EntropyChanges | FoldableChanges | FreezingChanges | DistillationChanges


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeChanges:
    """Changes to how a candidate is trained.

    Args:
        optimizer: of the weights of the layers' linears; everything else is AdamW's.
        schedule: how the learning rate falls after warm-up.
        final_rate_share: last learning rate over the peak.
        beta1: AdamW's decay of the mean gradient.
        beta2: AdamW's decay of the mean squared gradient.
        eps: AdamW's smallest denominator.
        weight_decay: of the weights of linears and tables.
        clip_norm: largest norm of the whole gradient.
        temperature_init: first value of every learned softmax temperature.
        precision: of products; what is stored stays in single precision. tf32 is for GPUs.
        recompute: compute layers again for their gradients, which takes less memory and a third more time.
    """

    scale: ScaleChanges = ScaleChanges()
    entropy: EntropyChanges = EntropyChanges()
    foldable: FoldableChanges = FoldableChanges()
    freezing: FreezingChanges = FreezingChanges()
    route: DistillationChanges = DistillationChanges()
    optimizer: OptimizerName | None = None
    schedule: RateSchedule | None = None
    final_rate_share: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    temperature_init: float | None = None
    precision: Precision | None = None
    recompute: bool | None = None


def add_recipe_flags(parser: cli.Parser, skip: Collection[str] = ()) -> None:
    """Add a flag `--recipe.*` for every change; `--recipe.help` lists them, and the help of the command names that one.

    skip: of those of the scale.
    """
    parts = {part.name: type(part.default) for part in fields(RecipeChanges) if is_dataclass(part.default)}
    parser.add_class_arguments(RecipeChanges, "recipe", skip=set(parts))
    for name, part in parts.items():
        parser.add_class_arguments(part, f"recipe.{name}", skip=set(skip) if name == "scale" else set())
    lines = []
    for action in parser._actions:
        if action.dest.split(".")[0] == "recipe":
            if "." in action.dest and action.help != SUPPRESS:
                name = action.dest.replace("_", "-")
                lines.append(f"  --{name} VALUE\n{indent(fill(str(action.help), 100), ' ' * 8)}")
            action.help = SUPPRESS
    parser.add_argument("--recipe.help", action=_RecipeHelp, text="\n".join(lines))


class _RecipeHelp(Action):
    """Prints the flags of the recipe and exits."""

    def __init__(self, option_strings: Sequence[str], text: str = "", **rest: Any) -> None:
        help = "list the flags --recipe.KEY VALUE, each of which changes one part of the recipe, and exit"
        super().__init__(option_strings, dest=SUPPRESS, default=SUPPRESS, nargs=0, help=help)
        self.text = text

    def __call__(self, *args: Any, **rest: Any) -> None:
        print(self.text)
        sys.exit(0)


def changed(recipe: Recipe, changes: RecipeChanges) -> Recipe:
    """The recipe with its changes.

    Raises UserError for a value out of its range, or changes of a regulariser or a schedule that is not there.
    """
    if recipe.entropy is None and _stated(changes.entropy):
        names = ", ".join(_stated(changes.entropy))
        raise UserError(f"changes of the regulariser ({names}) need an architecture named EReg(...).")
    if changes.entropy.form == "published-code" and changes.entropy.weight is None:
        raise UserError(
            "form=published-code needs a weight of its own, such as the papers' 1e-5, since it adds up over rows and "
            "sequences; state --recipe.entropy.weight."
        )
    if recipe.route is None and _stated(changes.route):
        raise UserError(
            f"changes of the distillation schedule ({', '.join(_stated(changes.route))}) need a parent; name it."
        )
    stated = _stated(changes.foldable)
    return replace(
        recipe,
        scale=replace(recipe.scale, **_stated(changes.scale)),
        entropy=recipe.entropy and replace(recipe.entropy, **_stated(changes.entropy)),
        freezing=replace(recipe.freezing, **_stated(changes.freezing)),
        route=recipe.route and replace(recipe.route, **_stated(changes.route)),
        foldable=replace(recipe.foldable or Foldable(), **stated) if stated else recipe.foldable,
        **_stated(changes),
    )


def _stated(changes: Changes | RecipeChanges) -> dict[str, Any]:
    values = {field.name: getattr(changes, field.name) for field in fields(changes)}
    return {name: value for name, value in values.items() if value is not None and not is_dataclass(value)}
