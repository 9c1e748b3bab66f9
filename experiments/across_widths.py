"""Does what a search at the proxy's width chooses hold at another width? The same placements, trained at each.

Each width has a parent of its own, trained as long as the others, and scores of its blocks. A price is that of the
real model at every width, so that widths differ in losses alone.
"""

import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from costmodel.config.units import format_seconds, parse_seconds
from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from experiments.bars import Figure, figure_table, table
from experiments.ranking import ranks_of, spearman
from experiments.searchers.table import scored_blocks
from experiments.trainings import DATA, Ended, Plan, Variant, read_outcomes, train_all
from nas.conversion.pretrained import CHECKSUMS_FILE
from nas.recipe.overrides import RecipeChanges, ScaleChanges
from nas.recipe.recipe import ScaleName
from nas.run.pareto import Point, hypervolume, nondominated
from nas.searchers.surrogate import kept, lacking
from nas.storage import RUNS, locked, replace_file
from nas.study.blocks import BLOCKS_FILE
from nas.training.distillation.sub_layers import to_csv
from search_spaces.bases import base_architecture
from search_spaces.notation import parse
from search_spaces.optima.stages import Floats
from search_spaces.pricing import price_architecture
from search_spaces.space import load_space
from search_spaces.workload import Workload

SCALE: ScaleName = "proxy"
SEQ_LEN = 128
COMMITTED = DATA / "across-widths.csv"
APART = 0.02  # nats: two whole standard errors of a difference, of seeds (0.006 each) and files (0.006)
LEAST_SPEARMAN, MOST_LOST = 0.9, 0.02  # bars: of a doubling; of the hypervolume

Losses = Mapping[str, float]  # nats by row; infinite where it diverged


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """head_dim: features a head. parent_rate, rate: peaks of the learning rate, of the parent and of candidates."""

    head_dim: int
    parent_rate: float
    rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it.

    rows: placements that a search may choose; control: rows of papers. parent: its notation; parent_config: a file of
    `nas.train`. widths: by the name of a column, each about twice the one before. reference_perplexity: with the
    budget the corner that hypervolumes are held against.

    Raises UserError for less than two widths.
    """

    base: str
    budget_latency: str
    reference_perplexity: float
    parent: str
    parent_config: str
    parent_tokens: int
    widths: dict[str, Width]
    control: tuple[str, ...]
    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.widths) < 2:
            raise UserError(f"`widths` must be at least 2 to compare, but got {', '.join(self.widths) or 'none'}.")


def run(name: str, settings: Settings, console: Console) -> None:
    """Prints tables; of widths that are not committed trains the parent and candidates as far as they are not.

    Raises UserError if another process is running the experiment, or a parent cannot be trained.
    """
    outcomes = committed(settings)
    for width in settings.widths:
        if width not in outcomes:
            folder = RUNS / "experiments" / name / width
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):
                outcomes[width] = _trained(settings, width, folder, console)
    losses = {
        width: {row: math.log(ended.ranked) for row, ended in outcomes[width].items()} for width in settings.widths
    }
    latency_s = prices(settings)
    console.print(loss_table(latency_s, losses))
    console.print(worth_table(settings, losses))
    console.print(figure_table("", figures(settings, latency_s, losses)))


def committed(settings: Settings) -> dict[str, dict[str, Ended]]:
    """What is committed of widths that are whole, by width and row. A parent trained elsewhere is not to the last digit
    this one, so that rows go by their names.
    """
    outcomes: dict[str, dict[str, Ended]] = {width: {} for width in settings.widths}
    for record in read_outcomes(COMMITTED) if COMMITTED.exists() else ():
        outcomes[record.variant][record.row] = record.ended
    rows = {*settings.rows, *settings.control}
    return {width: by_row for width, by_row in outcomes.items() if rows <= by_row.keys()}


def _trained(settings: Settings, width: str, folder: Path, console: Console) -> dict[str, Ended]:
    """Trains every row; blocks of the parent are scored beside."""
    parent = _parent(settings, width, folder, console)
    if not (folder / BLOCKS_FILE).exists():
        scores = scored_blocks(str(parent), load_space(settings.base).layers, SCALE, "stdlib")
        replace_file(folder / BLOCKS_FILE, to_csv(scores))
    size = settings.widths[width]
    recipe = RecipeChanges(scale=ScaleChanges(head_dim=size.head_dim, learning_rate=size.rate))
    plan = Plan(
        scale=SCALE,
        base=settings.base,
        rows=(*settings.rows, *settings.control),
        variants={width: Variant(seeds=(0,), parent=str(parent), recipe=recipe)},
    )
    return {job.row: ended for job, ended in train_all(plan, folder, console).items()}


def _parent(settings: Settings, width: str, folder: Path, console: Console) -> Path:
    """A folder of the width's parent, trained by two commands; one that was killed goes on."""
    training, target, size = folder / "training", folder / "parent", settings.widths[width]
    if not (target / CHECKSUMS_FILE).exists():
        given = ["--config", settings.parent_config, "--tokens", str(settings.parent_tokens)]
        given += ["--recipe.scale.head-dim", str(size.head_dim), "--recipe.scale.learning-rate", str(size.parent_rate)]
        anew = [settings.parent, *given, "--output-dir", str(training)]
        _command(console, "nas.train", *(["--resume", str(training)] if training.exists() else anew))
        _command(console, "nas.export", str(training), "--output-dir", str(target))
    return target


def _command(console: Console, *command: str) -> None:
    console.print(f"python -m {shlex.join(command)}", soft_wrap=True, highlight=False, markup=False)
    if code := subprocess.run([sys.executable, "-m", *command]).returncode:
        raise UserError(f"{command[0]} must end well, but ended with {code}; its last lines say why.")


def prices(settings: Settings) -> dict[str, float]:
    """Seconds a token of each row as it is deployed, at the size of the base."""
    base, pricer, workload = base_architecture(settings.base), load_pricer("published"), Workload(prompt_len=SEQ_LEN)

    def latency_s(row: str) -> float:
        return price_architecture(parse(row, base).architecture, pricer, workload, "deployed").price.latency_s

    return {row: latency_s(row) for row in (*settings.rows, *settings.control)}


def loss_table(latency_s: Mapping[str, float], losses: Mapping[str, Losses]) -> Table:
    """A line a row, cheapest first: its price; at each width perplexity and rank."""
    ranks = {width: ranks_of(by_row) for width, by_row in losses.items()}
    rows = [
        (
            row,
            format_seconds(latency_s[row]),
            *(f"{math.exp(by_row[row]):.2f}, {ranks[width][row]:g}" for width, by_row in losses.items()),
        )
        for row in sorted(latency_s, key=lambda row: latency_s[row])
    ]
    columns = ("row", "as deployed", *(f"width {width}" for width in losses))
    return table(columns, rows, title="validation perplexity, rank")


def worth_table(settings: Settings, losses: Mapping[str, Losses]) -> Table:
    """What the whole may lack, as the searcher `trellis` counts it, and what that is worth at each width, in nats.

    Losses are a + b ln((1 + layers) / (1 + attentions)) + c ln((1 + layers) / (1 + nonlinear FFNs)) + d gaps: b, c and
    d, by least squares over the rows that did not diverge, with standard errors.
    """
    base, lines = base_architecture(settings.base), []
    for width, by_row in losses.items():
        trained = {row: loss for row, loss in by_row.items() if math.isfinite(loss)}
        left = np.array([[kept(layer) for layer in parse(row, base).architecture.layers] for row in trained])
        fitted = linear_fit(lacking(left), np.array(list(trained.values())))
        lines.append((width, *(f"{worth:.2f} ± {error:.2f}" for worth, error in fitted)))
    return table(("width", "attentions", "nonlinear FFNs", "gaps"), lines, title="worth, nats")


def linear_fit(values: Floats, losses: Floats) -> list[tuple[float, float]]:
    """Least squares with a constant: for each column of the values its weight and that one's standard error."""
    rows = np.column_stack([values, np.ones(len(values))])
    inverse = np.linalg.inv(rows.T @ rows)
    weights = inverse @ rows.T @ losses
    left = losses - rows @ weights
    errors = np.sqrt(inverse.diagonal() * (left @ left) / (len(losses) - len(weights)))
    return list(zip(weights[:-1].tolist(), errors[:-1].tolist(), strict=True))


def figures(settings: Settings, latency_s: Mapping[str, float], losses: Mapping[str, Losses]) -> Iterator[Figure]:
    """What carries from each width to the next."""
    reference = parse_seconds(settings.budget_latency, "budget_latency"), math.log(settings.reference_perplexity)

    def of(rows: Sequence[str], width: str) -> Losses:
        return {row: losses[width][row] for row in rows}

    for narrow, wide in pairwise(losses):
        here, there = of(settings.rows, narrow), of(settings.rows, wide)
        control = spearman(of(settings.control, narrow), of(settings.control, wide))
        agreeing, num = pairs_apart(here, there)
        lost = share_lost(latency_s, here, there, reference)
        to = f"{narrow} to {wide}"
        yield Figure(f"{to}: Spearman", spearman(here, there), least=LEAST_SPEARMAN)
        yield Figure(f"{to}: Spearman, rows of papers", control)
        yield Figure(f"{to}: pairs {APART} nats apart, in order, of {num}", agreeing, form="{:.0f}")
        yield Figure(f"{to}: hypervolume lost", lost, form="{:.1%}", most=MOST_LOST)


def pairs_apart(narrow: Losses, wide: Losses) -> tuple[int, int]:
    """(pairs that both order alike, pairs) of those that are further apart than noise at both widths."""
    rows = list(narrow)
    apart = [
        (narrow[row] - narrow[other]) * (wide[row] - wide[other])
        for place, row in enumerate(rows)
        for other in rows[:place]
        if min(abs(by_row[row] - by_row[other]) for by_row in (narrow, wide)) > APART
    ]
    return sum(product > 0 for product in apart), len(apart)


def share_lost(latency_s: Mapping[str, float], narrow: Losses, wide: Losses, reference: Point) -> float:
    """The share of the whole front's hypervolume at the wide width that the narrow one's front lacks there."""

    def points(losses: Losses, rows: Sequence[str]) -> list[Point]:
        return [(latency_s[row], losses[row]) for row in rows]

    rows = [row for row in narrow if math.isfinite(narrow[row]) and math.isfinite(wide[row])]
    chosen = [row for row, is_chosen in zip(rows, nondominated(points(narrow, rows)), strict=True) if is_chosen]
    whole = hypervolume(points(wide, rows), reference)
    return 1 - hypervolume(points(wide, chosen), reference) / whole if whole else math.nan
