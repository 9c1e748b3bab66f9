"""`SearchSpace`: the set of models that may be proposed, with exact size, enumeration, membership and uniform sampling.

Its `Definition` is what a YAML file states: a base, and either choices per layer or a list of members.

A member is an architecture (a path of the space's graph) and whether its training recipe is entropy-regularised.
Members are numbered from 0 to `num_members(space) - 1`; the recipes of one architecture are next to each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import networkx as nx
import numpy as np

from costmodel.config.files import load_file
from costmodel.errors import UserError
from search_spaces.architecture import Architecture, Layer, default_final_norm, least_rank
from search_spaces.bases import OWN, Dimensions, base_architecture
from search_spaces.forms import Attention, Ffn, Inner, Norm, Stabiliser
from search_spaces.graph import (
    Choice,
    ConstraintName,
    Vertex,
    completions,
    free_graph,
    listed_graph,
    nth_layers,
    source,
    walk,
)
from search_spaces.inner import implied_logit_cap
from search_spaces.notation import Member, parse

SHIPPED = ("gpt2-small", "gpt2-papers", "gpt2-forms", "smollm2-135m", "ladder", "tiny")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The choices of every layer, listed in this order. Raises UserError for an empty field or a repeated choice."""

    norm1: tuple[Norm, ...]
    attention: tuple[Attention, ...]
    norm2: tuple[Norm, ...]
    ffn: tuple[Ffn, ...]
    stabiliser: tuple[Stabiliser, ...]
    inner1: tuple[Inner, ...] = ("own",)
    inner2: tuple[Inner, ...] = ("own",)

    def __post_init__(self) -> None:
        for choice in fields(self):
            _check_distinct(choice.name, getattr(self, choice.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Withheld:
    """Layers, counted from 0, that must not have attention `bounded`, and layers that must not have `power8`.

    Neither form subtracts a row's maximum, so that scores could overflow fixed point there. A UserError is raised if a
    layer is repeated.
    """

    bounded: tuple[int, ...] = ()
    power8: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for form, layers in asdict(self).items():
            if layers:
                _check_distinct(f"withheld.{form}", layers)

    def __or__(self, other: "Withheld") -> "Withheld":
        layers = {form: tuple(sorted({*layers, *getattr(other, form)})) for form, layers in asdict(self).items()}
        return Withheld(**layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A space before its graph is built; it has either `choices` or `members`.

    base: Name of a base model, or `parent` for the parent of a search.
    dimensions: Overrides of the base model's dimensions; none with base `parent`.
    choices: The choices of each layer.
    members: The names (`parse`) of all architectures of the space, without `EReg(...)`.
    constraints: Rules that exclude some architectures.
    withheld: Layers that must not have attention `bounded`, or `power8`.
    first_layers: Layers that every member begins with, whether or not they are among the choices.
    entropy_regularisation: Whether members train without (false) or with (true) entropy regularisation, or both.

    Raises UserError if not exactly one of `choices` and `members` is given, if `constraints`, `withheld` or
    `first_layers` are given with `members`, or `dimensions` with base `parent`, if `members` or
    `entropy_regularisation` is empty, or if an item of these two or of `constraints` is repeated.
    """

    name: str
    base: str
    dimensions: Dimensions = field(default_factory=Dimensions)
    choices: Choices | None = None
    members: tuple[str, ...] | None = None
    constraints: tuple[ConstraintName, ...] = ()
    withheld: Withheld = Withheld()
    first_layers: tuple[Layer, ...] = ()
    entropy_regularisation: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        if (self.choices is None) == (self.members is None):
            raise UserError("a space must have either `choices` or `members`, and not both.")
        if self.base == OWN and self.dimensions != Dimensions():
            raise UserError(f"`dimensions` of a space on `base: {OWN}` are the parent's; leave them out.")
        _check_distinct("entropy_regularisation", self.entropy_regularisation)
        if self.members is not None:
            narrowing = {"constraints": (), "withheld": Withheld(), "first_layers": ()}
            if odd := [name for name, none in narrowing.items() if getattr(self, name) != none]:
                raise UserError(f"`{odd[0]}` goes with `choices`, but the space lists its `members`; drop one of them.")
            _check_distinct("members", self.members)
        if self.constraints:
            _check_distinct("constraints", self.constraints)


def load_definition(name_or_path: str) -> Definition:
    """Read the definition of a shipped space, or the one in a `.yaml` file.

    A UserError is raised for an unknown name, or a file that is not a valid definition.
    """
    if name_or_path in SHIPPED:
        path = Path(__file__).parent / "spaces" / f"{name_or_path}.yaml"
    elif name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    else:
        raise UserError(
            f"space must be one of {', '.join(SHIPPED)} or the path of a .yaml file, but got {name_or_path!r:.80}."
        )
    return load_file(Definition, path)


def alphabet(choices: Choices) -> list[Layer]:
    """Return every distinct layer of the choices. If attention or FFN is `none`, its other fields are the defaults."""
    layers = [
        Layer(
            norm1="none" if attention == "none" else norm1,
            attention=attention,
            norm2="none" if ffn == "none" else norm2,
            ffn=ffn,
            stabiliser="none" if ffn == "none" else stabiliser,
            inner1="own" if attention == "none" else inner1,
            inner2="own" if ffn == "none" else inner2,
        )
        for norm1, attention, norm2, ffn, stabiliser, inner1, inner2 in product(
            *(getattr(choices, field.name) for field in fields(choices))
        )
    ]
    return list(dict.fromkeys(layers))


def _check_distinct(name: str, items: tuple[object, ...]) -> None:
    if not items:
        raise UserError(f"`{name}` must list at least one item, but is empty.")
    if repeated := [item for index, item in enumerate(items) if item in items[:index]]:
        raise UserError(f"`{name}` must list each item once, but lists {repeated[0]!r} twice.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchSpace:
    """A space that is ready to be searched, made by `load_space` or `build_space`.

    base: A model from which members differ only in the choices of layers, the final norm and whether there is a logit
        cap (see `member_of`). Its own choices and final norm do not matter.
    graph: Layered graph whose paths from source to sink are the architectures (`search_spaces.graph`).
    completions: Number of paths from each vertex to the sink.
    """

    definition: Definition
    base: Architecture
    graph: nx.DiGraph = field(repr=False)
    completions: dict[Vertex, int] = field(repr=False)

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def recipes(self) -> tuple[bool, ...]:
        """The values of `entropy_regularised` that members may have."""
        return self.definition.entropy_regularisation

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The distinct layers of its members, in the order of the graph."""
        return tuple(dict.fromkeys(vertex.layer for vertex in self.graph if isinstance(vertex, Choice)))


def load_space(name_or_path: str) -> SearchSpace:
    """Return a shipped space by name, or the space in a `.yaml` file; raise UserError if there is no valid one."""
    return build_space(load_definition(name_or_path))


@lru_cache(maxsize=8)  # takes half a second for GPT-2's space
def build_space(definition: Definition, base: Architecture | None = None) -> SearchSpace:
    """Build the space of a definition. base: model to use instead of the definition's base; None for that base.

    A UserError is raised if the base is unknown, its dimensions are impossible or it cannot have the layers of a listed
    member; if the name of one has EReg, another block or a final norm that its layers do not imply; if `withheld` names
    layers that the base does not have; if `first_layers` leave no layer to choose; or if the space is empty.
    """
    base = base or base_architecture(definition.base, definition.dimensions)
    if definition.choices is not None:
        withheld = asdict(definition.withheld)
        for form, depths in withheld.items():
            if any(not 0 <= depth < base.num_layers for depth in depths):
                raise UserError(
                    f"`withheld.{form}` of space {definition.name!r} must name layers from 0 to "
                    f"{base.num_layers - 1}, but got {list(depths)}."
                )
        if len(definition.first_layers) >= base.num_layers:
            raise UserError(
                f"space {definition.name!r} must leave a layer of {base.num_layers} to choose, but begins with "
                f"{len(definition.first_layers)} that are given; give fewer."
            )
        graph = free_graph(
            base.num_layers,
            base.block_facts,
            alphabet(definition.choices),
            definition.constraints,
            withheld=withheld,
            first_layers=definition.first_layers,
            has_caps=base.score_cap is not None,
        )
    else:
        listed = [_listed_layers(name, base) for name in definition.members or ()]
        graph = listed_graph(base.block_facts, listed, has_caps=base.score_cap is not None)
    return SearchSpace(definition=definition, base=base, graph=graph, completions=completions(graph))


def without(space: SearchSpace, withheld: Withheld) -> SearchSpace:
    """Return the space with `withheld` added to its own; a space that lists its members is returned unchanged.

    Otherwise, a UserError is raised if `withheld` names layers that the base does not have, or leaves no architecture.
    """
    definition = space.definition
    both = definition.withheld | withheld
    if definition.choices is None or both == definition.withheld:
        return space
    return build_space(replace(definition, withheld=both), space.base)


def with_first_layers(space: SearchSpace, layers: Sequence[Layer]) -> SearchSpace:
    """Return the space with these `first_layers` in place of its own.

    A UserError is raised if they leave no layer to choose or no architecture, or if any are given for a space that
    lists its members.
    """
    return build_space(replace(space.definition, first_layers=tuple(layers)), space.base)


def num_architectures(space: SearchSpace) -> int:
    """Return the exact number of architectures in the space."""
    return space.completions[source(space.graph)]


def num_members(space: SearchSpace) -> int:
    """Return the exact number of members of the space: architectures times `recipes`."""
    return num_architectures(space) * len(space.recipes)


def members(space: SearchSpace) -> Iterator[Member]:
    """Return an iterator over every member, in the order of their numbers."""
    return (member_at(space, index) for index in range(num_members(space)))


def member_at(space: SearchSpace, index: int) -> Member:
    """Return the member with this number; a UserError is raised if there is none."""
    if not 0 <= index < num_members(space):
        raise UserError(f"member index must be from 0 to {num_members(space) - 1}, but got {index}.")
    rest, recipe = divmod(index, len(space.recipes))
    graph, num_layers = space.graph, space.base.num_layers
    layers = nth_layers(graph, source(graph), num_layers, rest, space.completions.__getitem__)
    return member_of(space, layers, entropy_regularised=space.recipes[recipe])


def member_of(space: SearchSpace, layers: Sequence[Layer], *, entropy_regularised: bool | None = None) -> Member:
    """Return the space's base with other layers, as a member, whether or not it is in the space.

    The layers imply the final norm and the logit cap. entropy_regularised: None for the first of the space's `recipes`.
    A UserError is raised for layers that the base cannot have.
    """
    recipe = space.recipes[0] if entropy_regularised is None else entropy_regularised
    final_norm = default_final_norm(layers, least_rank(space.base.block_facts))
    cap = implied_logit_cap(space.base, layers)
    architecture = replace(space.base, layers=tuple(layers), final_norm=final_norm, logit_cap=cap)
    return Member(architecture=architecture, entropy_regularised=recipe)


def contains(space: SearchSpace, member: Member) -> bool:
    """Return whether a member is in the space.

    The layers must be a path of the graph, the recipe one of the space's, and other fields as `member_of` sets them. A
    UserError is raised for layers that the space's base cannot have.
    """
    return path_of_member(space, member) is not None


def path_of_member(space: SearchSpace, member: Member) -> list[Vertex] | None:
    """Return the vertices of a member's path, from the source to the head; None if the member is not in the space.

    A UserError is raised for layers that the space's base cannot have.
    """
    layers, recipe = member.architecture.layers, member.entropy_regularised
    if recipe not in space.recipes or member != member_of(space, layers, entropy_regularised=recipe):
        return None
    return _path_of(space, layers)


def sample(space: SearchSpace, rng: np.random.Generator) -> Member:
    """Draw a member uniformly."""
    return member_at(space, random_below(num_members(space), rng))


def random_below(bound: int, rng: np.random.Generator) -> int:
    """Draw a whole number from 0 to bound - 1 uniformly, however large the bound is."""
    assert bound > 0
    num_bits = bound.bit_length()
    while True:  # fewer than two draws on average
        drawn = int.from_bytes(rng.bytes((num_bits + 7) // 8), "little") & ((1 << num_bits) - 1)
        if drawn < bound:
            return drawn


def path_of(space: SearchSpace, layers: Sequence[Layer]) -> list[Vertex]:
    """Return the vertices of the path with these layers, from source to head; raise UserError if there is none."""
    path = _path_of(space, layers)
    if path is None:
        raise UserError(f"these layers are not in space {space.name!r}: {layers!r:.200}.")
    return path


def _path_of(space: SearchSpace, layers: Sequence[Layer]) -> list[Vertex] | None:
    path = walk(space.graph, source(space.graph), layers)
    if path is None or len(layers) != space.base.num_layers:
        return None
    return [*path, next(iter(space.graph.succ[path[-1]]))]


def _listed_layers(name: str, base: Architecture) -> tuple[Layer, ...]:
    named = parse(name, base)
    if named.entropy_regularised:
        raise UserError(f"member {name!r} must be without EReg(...); say so in `entropy_regularisation` instead.")
    if named.architecture.block != base.block:
        raise UserError(f"member {name!r} must keep the {base.block!r} block of its base, so without HH(...).")
    if named.architecture.final_norm != default_final_norm(named.architecture.layers, least_rank(base.block_facts)):
        raise UserError(f"member {name!r} must have the final norm that its layers imply; leave the last letter out.")
    return named.architecture.layers
