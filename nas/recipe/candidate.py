"""Candidates (an architecture with the recipe that trains it), their ids, and the recipes of the papers."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from costmodel.errors import UserError
from nas.recipe.distillation import (
    DistillationSchedule,
    fitted_parts,
    initial_architecture,
    parent_architecture,
    spread_layers,
    student_architecture,
)
from nas.recipe.recipe import (
    PARENT_STEP,
    SCALES,
    EntropyRegularisation,
    Recipe,
    ScaleName,
    from_parent,
    layers_kept_foldable,
    trained_architecture,
)
from search_spaces.architecture import Architecture, canonical, has_frozen_norms
from search_spaces.notation import Member, name_of

_NAMES_IN_IDS = {
    "prediction_weight": "distillation",
    "teacher_top_k": "most_likely",
    "spread_over_depth": "spread",
    "hidden_state_weight": "streams",
}
# Source: arXiv 2410.13060 and its training code, which do not state the betas.
CODEPARROT = Recipe(
    scale=SCALES["paper"],
    data="codeparrot",
    schedule="linear",
    final_rate_share=0.0,
    temperature_init=1e-2,  # arXiv 2501.03489
)

# Source: arXiv 2501.03489 and the Languini Kitchen that it uses (arXiv 2309.11197); the shortest of its three runs.
LANGUINI = Recipe(
    scale=replace(
        SCALES["paper"],
        vocab_size=16_384,
        seq_len=512,
        tokens=18_265 * 128 * 512,
        batch=128,
        learning_rate=6e-4,
        warmup_share=200 / 18_265,
    ),
    data="languini",
    schedule="cosine",
    final_rate_share=0.01,
    weight_decay=0.0,
    clip_norm=math.inf,  # gradients are not clipped
    temperature_init=1e-1,
)

PAPER_RECIPES = {recipe.data: recipe for recipe in (CODEPARROT, LANGUINI)}

# The papers' weights, 1e-5 and 5e-5, are for penalties summed over the rows of a batch, as in their code.
PAPER_PENALTIES = {
    "codeparrot": EntropyRegularisation(weight=1e-5 * 128 * 128),
    "languini": EntropyRegularisation(weight=5e-5 * 128 * 512),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An architecture at full size, for which costs are computed, and the recipe that trains it."""

    architecture: Architecture
    recipe: Recipe

    @property
    def trained(self) -> Architecture:
        """The architecture at the recipe's scale, whose weights are trained.

        With a parent, it is the `student_architecture`. Raises UserError if the context is shorter than the scale's
        sequences, a dimension is too large, or the number of layers does not fit the parent.
        """
        made, distillation = trained_architecture(self.architecture, self.recipe.scale), self.recipe.distillation
        if distillation is None:
            return made
        parent = parent_architecture(distillation, made)
        return student_architecture(made, parent, spread=distillation.spread_over_depth)

    @property
    def initial_architecture(self) -> Architecture:
        """The architecture at the start of training, with the parts of the parent that are still to be removed."""
        trained, distillation = self.trained, self.recipe.distillation
        if distillation is None:
            return trained
        return initial_architecture(trained, parent_architecture(distillation, trained))

    @property
    def name(self) -> str:
        """The papers' name if there is one, else layer codes; in EReg(...) if the recipe regularises entropy."""
        return name_of(self.architecture, entropy_regularised=self.recipe.entropy is not None)


def canonical_candidate(candidate: Candidate) -> dict[str, Any]:
    """Return the candidate as plain data.

    `freezing`, `foldable`, `linear_fit_tokens` and `spread_over_depth` are left out if they apply to nothing in the
    architecture. Settings of later versions are left out at their defaults, so that older candidates keep their ids.
    """
    recipe = asdict(candidate.recipe)
    architecture = candidate.architecture if candidate.recipe.distillation is None else candidate.trained
    if not has_frozen_norms(architecture):
        del recipe["freezing"]
    if candidate.recipe.foldable is None or not layers_kept_foldable(architecture):
        del recipe["foldable"]
    _leave_out_defaults(recipe, candidate.recipe, ("optimizer", "recompute", "compile"))
    if (distillation := candidate.recipe.distillation) is None:
        del recipe["distillation"]
    else:
        later = ("teacher_top_k", "trainable", "blockwise_tokens", "hidden_state_weight", "kept_layers")
        _leave_out_defaults(recipe["distillation"], distillation, later)
        del recipe["distillation"]["weight_rms"]  # the learning rate says what it changed
        if not fitted_parts(architecture, parent_architecture(distillation, architecture)):
            del recipe["distillation"]["linear_fit_tokens"]
        layers = candidate.architecture.layers
        if not distillation.spread_over_depth or spread_layers(layers) == layers:
            del recipe["distillation"]["spread_over_depth"]
    return {"architecture": canonical(candidate.architecture), "recipe": recipe}


def _leave_out_defaults(data: dict[str, Any], settings: Any, names: Sequence[str]) -> None:
    for field in fields(settings):
        if field.name in names and getattr(settings, field.name) == field.default:
            del data[field.name]


def candidate_id(candidate: Candidate) -> str:
    """Return twelve hexadecimal digits of the SHA-256 of `canonical_candidate`, which identify a candidate.

    The distillation schedule and some of its settings are hashed under older names, so that the ids in the committed
    data of experiments stay valid.
    """
    data = canonical_candidate(candidate)
    if (schedule := data["recipe"].pop("distillation", None)) is not None:
        data["recipe"]["route"] = {_NAMES_IN_IDS.get(name, name): value for name, value in schedule.items()}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def trial_id(candidate: Candidate, *, seed: int, attempt: int = 0) -> str:
    """Return the name of one training of a candidate, `<candidate_id>-s<seed>-a<attempt>`, safe as a folder name.

    Raises UserError for a negative seed or attempt.
    """
    if seed < 0 or attempt < 0:
        raise UserError(f"`seed` and `attempt` must not be negative, but got {seed=}, {attempt=}.")
    return f"{candidate_id(candidate)}-s{seed}-a{attempt}"


def candidate_at(
    member: Member,
    scale: ScaleName,
    *,
    data: str,
    distillation: DistillationSchedule | None = None,
    seq_len: int | None = None,
    tokens: int | None = None,
) -> Candidate:
    """Return a member as a candidate, with the recipe that `recipe_at` makes for it from the other arguments."""
    regularised = member.entropy_regularised
    recipe = recipe_at(
        scale, data, entropy_regularised=regularised, distillation=distillation, seq_len=seq_len, tokens=tokens
    )
    return Candidate(architecture=member.architecture, recipe=recipe)


def recipe_at(
    name: ScaleName,
    data: str,
    *,
    entropy_regularised: bool,
    distillation: DistillationSchedule | None = None,
    seq_len: int | None = None,
    tokens: int | None = None,
) -> Recipe:
    """Return the recipe of a scale on some data, adapted by `from_parent` if there is a distillation schedule.

    At scale `paper`, data `codeparrot` and `languini`, also as NAME:FOLDER, have the recipes of their papers.

    entropy_regularised: whether the recipe has an entropy regulariser. seq_len, tokens: None for the recipe's own; at
        scale `parent`, the batch follows `seq_len`, so that a step has at most PARENT_STEP tokens, or one longer
        sequence.
    Raises UserError for a number out of range.
    """
    corpus = data.partition(":")[0] if name == "paper" else ""
    recipe = PAPER_RECIPES.get(corpus, Recipe(scale=SCALES[name], optimizer="muon" if name == "proxy" else "adamw"))
    penalty = PAPER_PENALTIES.get(corpus, EntropyRegularisation()) if entropy_regularised else None
    recipe = replace(recipe, data=data, entropy=penalty)
    recipe = recipe if distillation is None else from_parent(recipe, distillation)
    scale = recipe.scale
    seq_len, tokens = scale.seq_len if seq_len is None else seq_len, scale.tokens if tokens is None else tokens
    scale = replace(scale, seq_len=seq_len, tokens=tokens)
    if name == "parent":
        batch = max(1, PARENT_STEP // seq_len)
        scale = replace(scale, batch=batch, micro_batch=batch)
    return replace(recipe, scale=scale)
