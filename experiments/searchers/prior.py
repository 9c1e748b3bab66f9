"""What losses of placements have in common over parents: the prior of the searcher `trellis`, by least squares.

Each parent counts alike, and has a constant of its own: the errors of its placements are about their mean, over the
spread of their losses. Weights are not negative: a search would make the most of any that is.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls

from costmodel.errors import UserError
from experiments.bars import table
from experiments.searchers.benchmark import is_of_pool
from experiments.searchers.table import CONFIGS
from experiments.trainings import DATA, read_outcomes
from nas.recipe.distillation import student_architecture
from nas.searchers.surrogate import kept, lacking
from nas.training.distillation.sub_layers import from_csv, trained_sub_layers
from search_spaces.notation import parse
from search_spaces.optima.stages import Floats
from search_spaces.space import load_space

PARENT = "SM+LN+G"
LACKING = ("attentions", "nonlinear FFNs", "gaps", "FFN scores")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParentRows:
    """Placements that were trained from a parent.

    outcomes, blocks: files of `experiments/data`; variant: of the outcomes; pool: of those, as the benchmark of
    searchers divides a table. perplexity: the parent's. space: of its dimensions, a file beside the experiment's.
    is_fitted: whether fits are over these rows too.
    """

    outcomes: str
    variant: str
    blocks: str
    perplexity: float
    space: str
    pool: str = "all"
    is_fitted: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it; parents by name."""

    parents: dict[str, ParentRows]


class Losses(NamedTuple):
    """lacking: rows x LACKING. over: nats over the parent's loss."""

    lacking: Floats
    over: Floats

    @property
    def scaled(self) -> "Losses":
        """Both about their means, over the spread of all losses together."""
        around = self.over - self.over.mean()
        size = math.sqrt(around @ around)
        return Losses((self.lacking - self.lacking.mean(axis=0)) / size, around / size)

    def r2(self, weights: Floats) -> float:
        """R^2 of the losses by these weights and a constant."""
        scaled = self.scaled
        left = scaled.over - scaled.lacking @ weights
        return float(1 - left @ left)


def run(name: str, settings: Settings, console: Console) -> None:
    """Prints the fit over all parents that it is to be over, and those without each of them."""
    del name
    parents = {name: losses_of(rows) for name, rows in settings.parents.items()}
    console.print(fit_table(parents, [name for name, rows in settings.parents.items() if rows.is_fitted]))


def losses_of(rows: ParentRows) -> Losses:
    """What placements that did not diverge lack, and the mean over seeds of what they lose.

    Raises UserError if the file has none of the variant.
    """
    base = load_space(str(CONFIGS / rows.space)).base
    parent = parse(PARENT, base).architecture
    by_row: dict[str, list[float]] = {}
    for record in read_outcomes(DATA / rows.outcomes):
        if record.variant == rows.variant:
            by_row.setdefault(record.row, []).append(math.log(record.ended.ranked / rows.perplexity))
    if not by_row:
        raise UserError(f"{rows.outcomes} must hold variant {rows.variant!r}, but does not.")
    path = DATA / rows.blocks
    divergences = from_csv(path.read_text(encoding="utf-8"), str(path)).divergences
    rows_lacking, over = [], []
    for number, (row, losses) in enumerate(by_row.items()):
        loss = statistics.fmean(losses)
        if not is_of_pool(number, rows.pool) or not math.isfinite(loss):
            continue
        trained = student_architecture(parse(row, base).architecture, parent, spread=True)
        left = np.array([kept(layer) for layer in trained.layers])
        scores = [math.log1p(divergences[part]) for part in trained_sub_layers(trained) if part.part == "ffn"]
        rows_lacking.append([*lacking(left[None])[0], sum(scores)])
        over.append(loss)
    return Losses(np.array(rows_lacking), np.array(over))


def fitted(parents: Mapping[str, Losses]) -> Floats:
    """The weights of LACKING, nats."""
    rows, over = zip(*(losses.scaled for losses in parents.values()), strict=True)
    weights: Floats = nnls(np.concatenate(rows), np.concatenate(over))[0]
    return weights


def fit_table(parents: Mapping[str, Losses], names: list[str]) -> Table:
    """A line a fit: over all of the names, and without each. Its weights; R^2 over every parent."""
    lines = []
    for left_out in (None, *names):
        weights = fitted({name: parents[name] for name in names if name != left_out})
        r2s = (f"{losses.r2(weights):.2f}" for losses in parents.values())
        lines.append((f"without {left_out}" if left_out else "all", *(f"{weight:.2f}" for weight in weights), *r2s))
    return table(("fit", *LACKING, *parents), lines, title="weights in nats; R^2 by parent")
