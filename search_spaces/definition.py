"""A search space as its YAML file states it: a base, and either choices per layer or a list of members."""

from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from costmodel.errors import UserError
from search_spaces.architecture import Layer
from search_spaces.bases import OWN, Dimensions
from search_spaces.forms import Attention, Ffn, Inner, Norm, Stabiliser
from search_spaces.graph import ConstraintName

SHIPPED = ("gpt2-small", "gpt2-papers", "gpt2-forms", "smollm2-135m", "ladder", "tiny")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The choices of every layer, in order of enumeration. Raises UserError for an empty list or a repeated choice."""

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
    """Layers, from 0, that do not offer an attention without a maximum, because rows would overflow fixed point."""

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

    Attributes:
        base, dimensions: A base model by name, and dimensions that override its own; or `parent`, without dimensions.
        choices: The choices of each layer.
        members: The names of all architectures of the space, without `EReg(...)`.
        constraints: Rules that exclude some architectures.
        withheld: Layers that do not offer a bounded softmax, or eighth powers.
        first_layers: Layers that every member begins with, whether or not they are among the choices.
        entropy_regularisation: Training recipes to search: plain (false), regularised (true) or both.

    Raises:
        UserError: If not exactly one of `choices` and `members` is given, constraints come without choices, or a list
            has repetitions.
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
    return decode(Definition, load_mapping(path), str(path))


def alphabet(choices: Choices) -> list[Layer]:
    """Return every distinct layer; a removed sub-layer has no norm, stabiliser or inner norm of its own."""
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
