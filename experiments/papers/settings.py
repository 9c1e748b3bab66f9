"""The YAML of an experiment on the papers: its rows, what is trained of them, and what is shown."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodel.errors import UserError
from costmodel.protocols.published_rows import PublishedRow, held_out_rows, published_rows
from experiments.trainings import Plan, Variant
from nas.recipe.overrides import RecipeChanges
from nas.recipe.recipe import SCALES, Normalisation, ScaleName, SlopeSharing
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.notation import Member
from search_spaces.resolve import resolve

DIVERGED = "diverged"
PLAIN = "the scale's recipe"
SHORTEST = 128  # tokens of the papers' shortest context, which corresponds to a scale's own sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of a table, or a curve of a figure, with the notation `net` (default: the row's name).

    `perplexity` is the printed one, or `diverged`, if no cost is printed. `recipe` replaces the experiment's changes.
    `normalisation` and `slopes` are as in `Variant`.
    """

    net: str | None = None
    perplexity: float | str | None = None
    recipe: RecipeChanges | None = None
    normalisation: Normalisation | None = None
    slopes: SlopeSharing = "layer"

    def __post_init__(self) -> None:
        if isinstance(self.perplexity, str) and self.perplexity != DIVERGED:
            raise UserError(f"`perplexity` must be a number or `{DIVERGED}`, but got {self.perplexity!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    Attributes:
        rows: Rows by name; savings are relative to the first.
        views: Names of `experiments.papers.run.VIEWS`; `contexts` are the prompt lengths in the view of FLOPs.
        seeds, recipe: Seeds of trainings (none trains nothing), and changes to the scale's recipe.
        dataset, printed_shares: Dataset of the printed rows; printed shares of heads by quarter of entropy, in percent.
        committed: File of outcomes in `experiments/data`.
    """

    scale: ScaleName
    title: str
    rows: dict[str, Row]
    views: tuple[str, ...]
    base: str = "gpt2-small"
    dimensions: Dimensions = field(default_factory=Dimensions)
    dataset: str = "CodeParrot"
    seq_len: int = SHORTEST
    seeds: tuple[int, ...] = ()
    recipe: RecipeChanges = field(default_factory=RecipeChanges)
    data: str = "stdlib"
    committed: str | None = None
    contexts: tuple[int, ...] = ()
    printed_shares: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rows or not self.views:
            raise UserError(f"`rows` and `views` must hold at least one, but got {[*self.rows]} and {[*self.views]}.")
        if odd := [row for row in self.printed_shares if row not in self.rows]:
            raise UserError(f"`printed_shares` must be of `rows`, but got {', '.join(odd)}.")

    def net(self, row: str) -> str:
        return self.rows[row].net or row

    def member(self, row: str) -> Member:
        """Return the architecture of a row, at the dimensions that are priced."""
        return resolve(self.net(row), base_architecture(self.base, self.dimensions))

    @property
    def printed(self) -> Mapping[str, PublishedRow]:
        """The rows whose costs the papers print, in this setting."""
        base = base_architecture(self.base, self.dimensions)
        setting = (base.num_layers, base.num_heads, base.d_model, base.vocab_size, self.seq_len, self.dataset)
        published = {
            row.notation: row
            for row in (*published_rows(), *held_out_rows())
            if (row.num_layers, row.num_heads, row.d_model, row.vocab_size, row.seq_len, row.dataset) == setting
            and base.block == BASES["gpt2-small"].block
        }
        return {name: published[self.net(name)] for name in self.rows if self.net(name) in published}

    @property
    def printed_perplexities(self) -> dict[str, float]:
        """Printed perplexities by row; a divergence is infinite."""
        given = {name: row.perplexity or DIVERGED for name, row in self.printed.items()}
        given |= {name: row.perplexity for name, row in self.rows.items() if row.perplexity is not None}
        return {name: math.inf if isinstance(value, str) else value for name, value in given.items()}

    def variant(self, row: str) -> str:
        """Return the name of a row's variant, which rows with the same training share."""
        trained = self.rows[row]
        return row if trained.recipe or trained.normalisation or trained.slopes != "layer" else PLAIN

    @property
    def plan(self) -> Plan:
        """The trainings; their sequences grow by the same factor as the contexts."""
        seq_len = SCALES[self.scale].seq_len * self.seq_len // SHORTEST
        variants = {
            self.variant(name): Variant(
                seeds=self.seeds,
                seq_len=seq_len,
                recipe=row.recipe or self.recipe,
                normalisation=row.normalisation,
                slopes=row.slopes,
            )
            for name, row in self.rows.items()
        }
        return Plan(
            scale=self.scale,
            base=self.base,
            dimensions=self.dimensions,
            rows=tuple(dict.fromkeys(map(self.net, self.rows))),
            variants=variants,
            data=self.data,
            committed=self.committed,
            pairs=frozenset((self.variant(name), self.net(name)) for name in self.rows),
        )
