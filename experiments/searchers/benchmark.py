"""Which searcher finds the best front for the fewest trained tokens: all of them, replayed on a table of trainings."""

import csv
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from costmodel.config.units import parse_seconds
from costmodel.cost import Budget
from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from experiments.bars import Figure, figure_table, table
from experiments.searchers.replay import Curve, Entry, Training, best_by_slice, budget_of, replay, replay_halving
from experiments.searchers.table import CONFIGS, TablePart, table_rows, table_space
from experiments.searchers.table import Settings as TableSettings
from experiments.trainings import DATA, Ended, read_outcomes, training_pool
from nas.conversion.parent import load_parent
from nas.recipe.distillation import parent_architecture
from nas.report.draw import draw_panels, save_figure
from nas.report.panels import LinePanel, PanelFigure, Series
from nas.searchers.anchors import anchors, published_members
from nas.searchers.strategy import SearchProblem
from nas.storage import RUNS
from nas.study.schedule import GENERATION_SIZE
from nas.training.distillation.sub_layers import from_csv
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_space
from search_spaces.notation import Member, parse, placement
from search_spaces.optima.stages import Floats
from search_spaces.pricing import price_architecture
from search_spaces.space import build_space
from search_spaces.workload import Workload

LEAST_ROWS = 8  # two generations
QUARTILES = (0.25, 0.5, 0.75)
REACHED = (0.95, 0.99)  # of the hypervolume of the pool: a good front, and next to nothing left
SEQ_LEN = 128
HALVING = "halving"  # a schedule of its own, no searcher behind ask and tell
KEPT_BACK = 3  # every so many rows of a table, one is for final figures alone

BARS = (  # title, rivals (none: all others), most tokens over theirs
    ("uniform", ("uniform",), 1 / 3),
    ("the best of four baselines", ("nsga2", "tpe", "gp", "evolution"), 1 / 2),
    ("the best of all", (), 1.0),
)

Entries: TypeAlias = dict[Member, Entry]
Curves: TypeAlias = Mapping[str, Sequence[Curve]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedPart:
    """A part of the table, and what a search of it is given.

    pools: `development` is what anything may be tuned on, two rows of three; `final` the others; `all` both.
    parent_loss: nats, of the part's parent.
    """

    pools: tuple[str, ...]
    budget_latency: str
    parent_loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it.

    table: that experiment's file. reference_perplexity: of the unigram model. judged: the searcher that bars are on.
    """

    table: str
    parts: dict[str, ReplayedPart]
    reference_perplexity: float
    num_runs: int
    num_trials: int
    searchers: tuple[str, ...]
    judged: str


def run(name: str, settings: Settings, console: Console) -> None:
    """Prints tables for every part and pool, and writes them and a plot to its folder.

    Raises UserError for a part of which too little is trained.
    """
    listed = load_mapping(CONFIGS / settings.table)
    parts = decode(TableSettings, {key: listed[key] for key in listed if key != "kind"}, settings.table).parts
    with training_pool() as workers:
        for part_name, replayed in settings.parts.items():
            entries = read_entries(parts[part_name])
            for pool_name in replayed.pools:
                pool = pool_of(entries, pool_name)
                problem = pool_problem(settings, replayed, parts[part_name], pool)
                curves = _replays(settings, problem, pool, workers)
                marks = [budget_of(pool, num) for num in range(1, settings.num_trials + 1)]
                title = f"part {part_name}, {pool_name}: {len(pool)} architectures"
                console.print(title, style="bold")
                best = best_by_slice(problem.feasible, list(pool.values()))
                for shown in tables(curves, best, marks):
                    console.print(shown)
                console.print(figure_table("", verdicts(curves, settings.judged, marks)))
                folder = RUNS / "experiments" / name
                folder.mkdir(parents=True, exist_ok=True)
                write_curves(folder / f"{part_name}-{pool_name}.csv", curves)
                figure = regret_figure(title, curves, marks)
                written = save_figure(folder / f"{part_name}-{pool_name}", draw_panels(figure))
                console.print(f"plot: {written[0]}", soft_wrap=True, highlight=False)


def _replays(settings: Settings, problem: SearchProblem, pool: Entries, workers: Executor) -> dict[str, list[Curve]]:
    """Replays every run of every searcher, on all cores at once."""
    replays: dict[str, Callable[..., Curve]] = {name: partial(replay, name) for name in settings.searchers}
    if HALVING in replays:
        replays[HALVING] = replay_halving
    asked = {
        name: [
            workers.submit(replayed, problem, pool, num_trials=settings.num_trials, seed=seed)
            for seed in range(settings.num_runs)
        ]
        for name, replayed in replays.items()
    }
    return {name: [future.result() for future in futures] for name, futures in asked.items()}


def read_entries(part: TablePart) -> Entries:
    """What is trained of a part, in the order of its space. Raises UserError if that is too little for a search."""
    base = table_space(part).base
    rows: dict[str, list[Ended]] = {row: [] for row in table_rows(part)}
    for record in read_outcomes(DATA / part.committed):
        rows[record.row].append(record.ended)
    rows = {row: ended for row, ended in rows.items() if ended}
    if len(rows) < LEAST_ROWS:
        raise UserError(
            f"{part.committed} must hold at least {LEAST_ROWS} architectures, but holds {len(rows)}; "
            f"train more of them: python -m experiments run table."
        )
    pricer, entries = load_pricer(), Entries()
    for row, ended in rows.items():
        member = parse(row, base)
        price = price_architecture(member.architecture, pricer, Workload(prompt_len=SEQ_LEN), "deployed").price
        entries[member] = Entry(member, price.latency_s, tuple(map(_training, ended)))
    return entries


def _training(ended: Ended) -> Training:
    loss = None if ended.perplexity is None else math.log(ended.perplexity)
    return Training(loss=loss, tokens=ended.tokens, rungs=ended.rungs)


def pool_of(entries: Entries, name: str) -> Entries:
    """Part of a table, by name. Raises UserError for an unknown one."""
    return {member: entry for number, (member, entry) in enumerate(entries.items()) if is_of_pool(number, name)}


def is_of_pool(number: int, name: str) -> bool:
    """Whether the row of that number is of this part of a table. Raises UserError for an unknown one."""
    if name not in ("all", "development", "final"):
        raise UserError(f"`pools` must be of all, development and final, but got {name!r}.")
    return name == "all" or (number % KEPT_BACK == KEPT_BACK - 1) == (name == "final")


def pool_problem(settings: Settings, replayed: ReplayedPart, part: TablePart, entries: Entries) -> SearchProblem:
    """What searchers know: a space that lists just the architectures of the pool, the parent and its blocks."""
    definition = replace(
        table_space(part).definition,
        choices=None,
        members=tuple(placement(member.architecture) for member in entries),
    )
    priced = price_space(build_space(definition), load_pricer(), SEQ_LEN)
    feasible = within_budget(priced, Budget(latency_s=parse_seconds(replayed.budget_latency, "budget_latency")))
    parent = load_parent(part.parent_name)
    path = DATA / part.blocks
    return SearchProblem(
        feasible=feasible,
        anchors=tuple(anchors(feasible, published_members(feasible.space))),
        reference_loss=math.log(settings.reference_perplexity),
        parent=parent_architecture(parent.route, feasible.space.base),
        parent_loss=replayed.parent_loss,
        blocks=from_csv(path.read_text(encoding="utf-8"), str(path)),
    )


def regrets(runs: Sequence[Curve], marks: Sequence[int]) -> Floats:
    """Quartiles over runs, % of the hypervolume of the whole pool, once so many tokens are trained: marks x 3.

    What is in training then does not count.
    """
    shares = np.array([[_share_at(curve, mark) for curve in runs] for mark in marks])
    quartiles: Floats = np.quantile(100 * (1 - shares), QUARTILES, axis=1)
    return quartiles.T


def _share_at(curve: Curve, tokens: int) -> float:
    """What was found by then, 0 before the first training has ended."""
    ended = bisect_right(curve.tokens, tokens)
    return curve.shares[ended - 1] if ended else 0.0


def tables(curves: Curves, best: Sequence[float | None], marks: Sequence[int]) -> list[Table]:
    """Regret by generations' worth of tokens, and tokens until REACHED of all hypervolume. best: of all, by slice."""
    shown = marks[GENERATION_SIZE - 1 :: GENERATION_SIZE]
    growth = table(
        ("searcher", *(f"{mark / 1e6:.1f}" for mark in shown)),
        (
            (searcher, *(f"{median:.1f} ({low:.1f}-{high:.1f})" for low, median, high in regrets(runs, shown)))
            for searcher, runs in curves.items()
        ),
        title="regret, % of hypervolume, median (quartiles), by millions of trained tokens",
    )
    rows = []
    for searcher, runs in curves.items():
        tokens = [_millions([tokens_until(curve, share) for curve in runs]) for share in REACHED]
        by_slice = ", ".join(_perplexity([curve.best[at] for curve in runs]) for at in range(len(best)))
        rows.append((searcher, *tokens, by_slice))
    rows.append(("all that is in the pool", *("" for _ in REACHED), ", ".join(_perplexity([loss]) for loss in best)))
    reached = table(
        ("searcher", *(f"{share:.0%}" for share in REACHED), "best perplexity by price, cheapest slice first"),
        rows,
        title="millions of trained tokens until so much of the hypervolume, median (quartiles)",
    )
    return [growth, reached]


def tokens_until(curve: Curve, reached: float) -> float:
    """Trained tokens until this share of the whole hypervolume; infinite if it was not reached."""
    pairs = zip(curve.tokens, curve.shares, strict=True)
    return next((float(tokens) for tokens, share in pairs if share >= reached), math.inf)


def verdicts(curves: Curves, judged: str, marks: Sequence[int]) -> list[Figure]:
    """How the judged searcher does against the others, by medians; infinite if half of its runs end before."""
    figures = []
    for reached, (title, names, most) in product(REACHED, BARS):
        medians = {
            name: statistics.median(tokens_until(curve, reached) for curve in runs) for name, runs in curves.items()
        }
        rivals = [name for name in names or curves if name in curves and name != judged]
        if rivals:
            best = min(rivals, key=medians.__getitem__)
            ratio = medians[judged] / medians[best] if math.isfinite(medians[judged]) else math.inf
            name = f"tokens of {judged} until {reached:.0%}, over those of {title} ({best})"
            figures.append(Figure(name, ratio, most=most))
    if "stratified" in curves:
        ours, theirs = (regrets(curves[name], marks)[:, 1] for name in (judged, "stratified"))
        name = f"numbers of tokens, of {len(marks)}, at which {judged} is worse than stratified"
        figures.append(Figure(name, float((ours > theirs).sum()), "{:.0f}", most=0.0))
    return figures


def write_curves(path: Path, curves: Curves) -> None:
    """Every point of every run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["searcher", "run", "tokens", "share_of_hypervolume"])
        for searcher, runs in curves.items():
            for number, curve in enumerate(runs):
                points = zip(curve.tokens, curve.shares, strict=True)
                writer.writerows([searcher, number, tokens, f"{share:.6f}"] for tokens, share in points)


def regret_figure(title: str, curves: Curves, marks: Sequence[int]) -> PanelFigure:
    """Medians of regret against trained tokens; and the upper quartiles, what a run in four does worse than."""
    quartiles = {name: regrets(runs, marks) for name, runs in curves.items()}
    millions = tuple(mark / 1e6 for mark in marks)
    panels = []
    for label, pick in (("median", 1), ("upper quartile", 2)):
        series = tuple(Series(name, millions, tuple(regret[:, pick].tolist())) for name, regret in quartiles.items())
        axes = ("trained tokens, millions", "regret, % of hypervolume")
        panels.append(LinePanel(f"{label} of runs", *axes, series, log_y=True))
    return PanelFigure(title=title, panels=tuple(panels), columns=2)


def _millions(tokens: Sequence[float]) -> str:
    """Median and quartiles, each that of a run; a dash where that run did not get there."""
    low, median, high = (sorted(tokens)[round(share * (len(tokens) - 1))] for share in QUARTILES)
    shown = ["-" if math.isinf(count) else f"{count / 1e6:.1f}" for count in (median, low, high)]
    return f"{shown[0]} ({shown[1]}-{shown[2]})"


def _perplexity(losses: Sequence[float | None]) -> str:
    """The median of those that there are, if most runs have one."""
    known = [loss for loss in losses if loss is not None]
    return f"{math.exp(statistics.median(known)):.2f}" if 2 * len(known) > len(losses) else "-"
