"""A candidate, which a trial trains: a priced architecture and the recipe it is trained with."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
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
from nas.recipe.papers import recipe_at
from nas.recipe.recipe import Recipe, ScaleName, layers_kept_foldable, trained_architecture
from search_spaces.architecture import Architecture, canonical, has_frozen_norms
from search_spaces.notation import Member, name_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An architecture as it would be deployed (and is priced), and how it is trained."""

    architecture: Architecture
    recipe: Recipe

    @property
    def trained(self) -> Architecture:
        """The architecture at the recipe's scale: the one whose weights are trained.

        From a parent, norms that the candidate lacks are frozen ones, which deploy alike.
        """
        made, route = trained_architecture(self.architecture, self.recipe.scale), self.recipe.route
        if route is None:
            return made
        return student_architecture(made, parent_architecture(route, made), spread=route.spread)

    @property
    def initial_architecture(self) -> Architecture:
        """The architecture at the start of training: with the parts of the parent that are yet to go."""
        trained, route = self.trained, self.recipe.route
        return trained if route is None else initial_architecture(trained, parent_architecture(route, trained))

    @property
    def name(self) -> str:
        """The papers' name, or the placement, with EReg(...) around it if the recipe regularises entropy."""
        return name_of(self.architecture, entropy_regularised=self.recipe.entropy is not None)


def canonical_candidate(candidate: Candidate) -> dict[str, Any]:
    """The candidate as plain data; freezing, foldable, linear fits, spread only where there is what they act on.

    What is left out keeps the `candidate_id` of every candidate from before there was this field.
    """
    recipe = asdict(candidate.recipe)
    architecture = candidate.architecture if candidate.recipe.route is None else candidate.trained
    if not has_frozen_norms(architecture):
        del recipe["freezing"]
    if candidate.recipe.foldable is None or not layers_kept_foldable(architecture):
        del recipe["foldable"]
    _leave_out_defaults(recipe, candidate.recipe, ("optimizer", "recompute"))
    if (route := candidate.recipe.route) is None:
        del recipe["route"]
    else:
        later = ("most_likely", "trainable", "blockwise_tokens", "streams", "kept_layers")
        _leave_out_defaults(recipe["route"], route, later)
        if not fitted_parts(architecture, parent_architecture(route, architecture)):
            del recipe["route"]["linear_fit_tokens"]
        if not route.spread or spread_layers(candidate.architecture.layers) == candidate.architecture.layers:
            del recipe["route"]["spread"]
    return {"architecture": canonical(candidate.architecture), "recipe": recipe}


def _leave_out_defaults(data: dict[str, Any], settings: Any, names: Sequence[str]) -> None:
    for field in fields(settings):
        if field.name in names and getattr(settings, field.name) == field.default:
            del data[field.name]


def candidate_id(candidate: Candidate) -> str:
    """Twelve hexadecimal digits that name an architecture together with its recipe: SHA-256 of the canonical form."""
    text = json.dumps(canonical_candidate(candidate), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def trial_id(candidate: Candidate, *, seed: int, attempt: int = 0) -> str:
    """A candidate trained once: `<candidate_id>-s<seed>-a<attempt>`, safe as a folder name.

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
    route: DistillationSchedule | None = None,
    seq_len: int | None = None,
    tokens: int | None = None,
) -> Candidate:
    """A member with the recipe of a scale, as `recipe_at` makes it."""
    regularised = member.entropy_regularised
    recipe = recipe_at(scale, data, entropy_regularised=regularised, route=route, seq_len=seq_len, tokens=tokens)
    return Candidate(architecture=member.architecture, recipe=recipe)
