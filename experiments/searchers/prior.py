"""Fits the prior of the searcher `trellis` by least squares: what losses of placements have in common over parents.

All parents have equal weight and their own constant: errors are relative to the mean of a parent's losses, and to their
spread. Weights are not negative, because a search would exploit negative ones.
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

    `outcomes` and `blocks` are files of `experiments/data`; `variant` and `pool` select rows of the outcomes, as the
    benchmark of searchers does. `perplexity` is the parent's, `space` a file beside the experiment's with its
    dimensions. `is_fitted` says whether fits include these rows.
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
    """The experiment's YAML, with parents by name."""

    parents: dict[str, ParentRows]


class Losses(NamedTuple):
    """What placements lack (rows x LACKING), and their losses over the parent's in nats."""

    lacking: Floats
    over: Floats

    @property
    def scaled(self) -> "Losses":
        """Both minus their means, divided by the total spread of the losses."""
        around = self.over - self.over.mean()
        size = math.sqrt(around @ around)
        return Losses((self.lacking - self.lacking.mean(axis=0)) / size, around / size)

    def r2(self, weights: Floats) -> float:
        """Return R^2 of the losses by these weights and a constant."""
        scaled = self.scaled
        left = scaled.over - scaled.lacking @ weights
        return float(1 - left @ left)


def run(name: str, settings: Settings, console: Console) -> None:
    """Print the fit over all fitted parents, and the fits without each of them."""
    del name
    parents = {name: losses_of(rows) for name, rows in settings.parents.items()}
    console.print(fit_table(parents, [name for name, rows in settings.parents.items() if rows.is_fitted]))


def losses_of(rows: ParentRows) -> Losses:
    """Return what placements lack and their mean losses over seeds, without diverged ones.

    A UserError is raised if the file has no row of the variant.
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
    """Return the weights of LACKING in nats."""
    rows, over = zip(*(losses.scaled for losses in parents.values()), strict=True)
    weights: Floats = nnls(np.concatenate(rows), np.concatenate(over))[0]
    return weights


def fit_table(parents: Mapping[str, Losses], names: list[str]) -> Table:
    """Tabulate the fits over all names and without each, with weights and R^2 for every parent."""
    lines = []
    for left_out in (None, *names):
        weights = fitted({name: parents[name] for name in names if name != left_out})
        r2s = (f"{losses.r2(weights):.2f}" for losses in parents.values())
        lines.append((f"without {left_out}" if left_out else "all", *(f"{weight:.2f}" for weight in weights), *r2s))
    return table(("fit", *LACKING, *parents), lines, title="weights in nats; R^2 by parent")
