"""Compares searchers by the front that they find per trained token, replayed on a table of trainings."""

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from costmodel.config.files import decode, load_mapping
from costmodel.config.units import parse_seconds
from costmodel.cost import Budget
from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from costmodel.report.tables import table
from experiments.searchers.replay import Curve, Entry, Training, best_by_slice, budget_of, replay
from experiments.searchers.table import CONFIGS, TablePart, table_rows, table_space
from experiments.searchers.table import Settings as TableSettings
from experiments.trainings import DATA, Ended, read_outcomes, training_pool
from nas.conversion.parent import load_parent
from nas.recipe.distillation import parent_architecture
from nas.report.draw import draw_panels, save_figure
from nas.report.front_figures import LinePanel, PanelFigure, Series
from nas.searchers.strategy import SearchProblem
from nas.storage import RUNS, write_csv
from nas.study.schedule import GENERATION_SIZE
from nas.training.distillation.sub_layers import from_csv
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_architecture, price_space
from search_spaces.lower import Workload
from search_spaces.notation import Member, parse, placement
from search_spaces.optima import Floats
from search_spaces.space import build_space

LEAST_ROWS = 8  # two generations
QUARTILES = (0.25, 0.5, 0.75)
REACHED = (0.95, 0.99)  # shares of the pool's hypervolume: of a good front, and of an almost complete one
SEQ_LEN = 128
KEPT_BACK = 3  # one row in three is reserved for final figures

BARS = (  # title, rivals (empty: all others), greatest ratio of tokens to the best rival's
    ("uniform", ("uniform",), 1 / 3),
    ("the best of four baselines", ("nsga2", "tpe", "gp", "evolution"), 1 / 2),
    ("the best of all", (), 1.0),
)

Entries: TypeAlias = dict[Member, Entry]
Curves: TypeAlias = Mapping[str, Sequence[Curve]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedPart:
    """The settings of the searches that are replayed on a part of the table.

    pools: sets of rows to search: `development`, two rows of three, for tuning; `final`, the others; `all`.
    budget_latency: with a unit, such as 5min. parent_loss: nats per token.
    """

    pools: tuple[str, ...]
    budget_latency: str
    parent_loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    table: the file of the table's experiment, in `experiments/configs`. parts: settings by name of a part of the table.
    reference_perplexity: the unigram baseline's. num_runs: searches per searcher, with seeds from 0. num_trials: number
    of full trainings whose tokens a search may use. judged: the searcher to which `BARS` apply; one of `searchers`.
    """

    table: str
    parts: dict[str, ReplayedPart]
    reference_perplexity: float
    num_runs: int
    num_trials: int
    searchers: tuple[str, ...]
    judged: str


def run(name: str, settings: Settings, console: Console) -> None:
    """Print tables for every part and pool; write the curves of all runs as CSV, and a plot, to RUNS/experiments/NAME.

    A UserError is raised for an unknown part, pool or searcher, if `judged` is none of the searchers, or if a part has
    too few trained architectures.
    """
    listed = load_mapping(CONFIGS / settings.table)
    parts = decode(TableSettings, {key: listed[key] for key in listed if key != "kind"}, settings.table).parts
    if settings.judged not in settings.searchers or not settings.parts.keys() <= parts.keys():
        raise UserError(
            f"`judged` must be one of {', '.join(settings.searchers)} and `parts` some of {', '.join(parts)}, but got "
            f"{settings.judged} and {', '.join(settings.parts)}."
        )
    with training_pool() as workers:
        for part_name, replayed in settings.parts.items():
            entries = read_entries(parts[part_name])
            for pool_name in replayed.pools:
                pool = pool_of(entries, pool_name)
                problem = pool_problem(settings, replayed, parts[part_name], pool)
                asked = {
                    searcher: [
                        workers.submit(replay, searcher, problem, pool, settings.num_trials, seed)
                        for seed in range(settings.num_runs)
                    ]
                    for searcher in settings.searchers
                }
                curves = {searcher: [future.result() for future in futures] for searcher, futures in asked.items()}
                marks = [budget_of(pool, num) for num in range(1, settings.num_trials + 1)]
                title = f"part {part_name}, {pool_name}: {len(pool)} architectures"
                console.print(title, style="bold")
                best = best_by_slice(problem.feasible, list(pool.values()))
                for shown in tables(curves, best, marks):
                    console.print(shown)
                judged = verdicts(curves, settings.judged, marks)
                console.print(table(("",), ("measured", "bar", "verdict"), judged, title=""))
                folder = RUNS / "experiments" / name
                folder.mkdir(parents=True, exist_ok=True)
                points = (
                    (searcher, number, tokens, f"{share:.6f}")
                    for searcher, runs in curves.items()
                    for number, curve in enumerate(runs)
                    for tokens, share in zip(curve.tokens, curve.shares, strict=True)
                )
                columns = ("searcher", "run", "tokens", "share_of_hypervolume")
                write_csv(folder / f"{part_name}-{pool_name}.csv", columns, points)
                figure = regret_figure(title, curves, marks)
                written = save_figure(folder / f"{part_name}-{pool_name}", draw_panels(figure))
                console.print(f"plot: {written[0]}", soft_wrap=True, highlight=False)


def read_entries(part: TablePart) -> Entries:
    """Return the trained members of a part, in the order of its space.

    Raises UserError if there are too few, or their file is damaged.
    """
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
        price = price_architecture(member.architecture, pricer, Workload(prompt_len=SEQ_LEN), "folded").price
        losses = (None if one.perplexity is None else math.log(one.perplexity) for one in ended)
        trainings = (Training(loss, one.tokens, one.rungs) for loss, one in zip(losses, ended, strict=True))
        entries[member] = Entry(member, price.latency_s, tuple(trainings))
    return entries


def pool_of(entries: Entries, name: str) -> Entries:
    """Return the entries of a pool: `all`, `development` or `final`. A UserError is raised for another name."""
    if name not in ("all", "development", "final"):
        raise UserError(f"`pools` must be of all, development and final, but got {name!r}.")
    return {
        member: entry
        for number, (member, entry) in enumerate(entries.items())
        if name == "all" or (number % KEPT_BACK == KEPT_BACK - 1) == (name == "final")
    }


def pool_problem(settings: Settings, replayed: ReplayedPart, part: TablePart, entries: Entries) -> SearchProblem:
    """Return the problem for searchers: a space of exactly the pool's members, the parent, and its block scores."""
    placements = tuple(placement(member.architecture) for member in entries)
    definition = replace(table_space(part).definition, choices=None, members=placements)
    priced = price_space(build_space(definition), load_pricer(), SEQ_LEN)
    feasible = within_budget(priced, Budget(latency_s=parse_seconds(replayed.budget_latency, "budget_latency")))
    parent, path = load_parent(part.parent_name), DATA / part.blocks
    return SearchProblem(
        feasible=feasible,
        reference_loss=math.log(settings.reference_perplexity),
        parent=parent_architecture(parent.distillation, feasible.space.base),
        parent_loss=replayed.parent_loss,
        blocks=from_csv(path.read_text(encoding="utf-8"), str(path)),
    )


def regrets(runs: Sequence[Curve], marks: Sequence[int]) -> Floats:
    """Return the three quartiles over runs of the regret after each number of trained tokens (`marks`): marks x 3.

    Regret is the share of the pool's hypervolume, in %, that a run's front lacks. Unfinished trainings do not count.
    """
    shares = np.array([[(0.0, *curve.shares)[bisect_right(curve.tokens, mark)] for curve in runs] for mark in marks])
    quartiles: Floats = np.quantile(100 * (1 - shares), QUARTILES, axis=1)
    return quartiles.T


def tables(curves: Curves, best: Sequence[float | None], marks: Sequence[int]) -> list[Table]:
    """Return a table of regret by trained tokens, and one of tokens until REACHED and of the best perplexities.

    best: the pool's least loss in each slice of the cost, nats. marks: numbers of tokens, some of which get a column.
    """
    shown = marks[GENERATION_SIZE - 1 :: GENERATION_SIZE]
    growth = table(
        ("searcher",),
        [f"{mark / 1e6:.1f}" for mark in shown],
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
        ("searcher",),
        [*(f"{share:.0%}" for share in REACHED), "best perplexity by price, cheapest slice first"],
        rows,
        title="millions of trained tokens until so much of the hypervolume, median (quartiles)",
    )
    return [growth, reached]


def tokens_until(curve: Curve, reached: float) -> float:
    """Return the number of trained tokens until a share of the hypervolume; infinite if the share was not reached."""
    pairs = zip(curve.tokens, curve.shares, strict=True)
    return next((float(tokens) for tokens, share in pairs if share >= reached), math.inf)


def verdicts(curves: Curves, judged: str, marks: Sequence[int]) -> list[list[str]]:
    """Return rows of name, value, bound, and PASS or FAIL, which compare the searcher `judged` with others (`BARS`).

    They are compared by the median of tokens until REACHED shares of the hypervolume, infinite if half of the runs do
    not reach a share. The last row counts the marks at which `stratified`, if it was run, has a lower median regret.
    """
    rows = []
    for reached, (title, names, most) in product(REACHED, BARS):
        medians = {
            name: statistics.median(tokens_until(curve, reached) for curve in runs) for name, runs in curves.items()
        }
        rivals = [name for name in names or curves if name in curves and name != judged]
        if rivals:
            best = min(rivals, key=medians.__getitem__)
            ratio = medians[judged] / medians[best] if math.isfinite(medians[judged]) else math.inf
            name = f"tokens of {judged} until {reached:.0%}, over those of {title} ({best})"
            rows.append([name, f"{ratio:.2f}", f"<= {most:.2f}", "PASS" if ratio <= most else "FAIL"])
    if "stratified" in curves:
        ours, theirs = (regrets(curves[name], marks)[:, 1] for name in (judged, "stratified"))
        name = f"numbers of tokens, of {len(marks)}, at which {judged} is worse than stratified"
        num_worse = int((ours > theirs).sum())
        rows.append([name, str(num_worse), "<= 0", "FAIL" if num_worse else "PASS"])
    return rows


def regret_figure(title: str, curves: Curves, marks: Sequence[int]) -> PanelFigure:
    """Return a figure of each searcher's regret, median and upper quartile, against trained tokens."""
    quartiles = {name: regrets(runs, marks) for name, runs in curves.items()}
    millions = tuple(mark / 1e6 for mark in marks)
    panels = []
    for label, pick in (("median", 1), ("upper quartile", 2)):
        series = tuple(Series(name, millions, tuple(regret[:, pick].tolist())) for name, regret in quartiles.items())
        axes = ("trained tokens, millions", "regret, % of hypervolume")
        panels.append(LinePanel(f"{label} of runs", *axes, series, log_y=True))
    return PanelFigure(title=title, panels=tuple(panels), columns=2)


def _millions(tokens: Sequence[float]) -> str:
    """Format median and quartiles, each of a run; a dash if that run did not reach the share."""
    low, median, high = (sorted(tokens)[round(share * (len(tokens) - 1))] for share in QUARTILES)
    shown = ["-" if math.isinf(count) else f"{count / 1e6:.1f}" for count in (median, low, high)]
    return f"{shown[0]} ({shown[1]}-{shown[2]})"


def _perplexity(losses: Sequence[float | None]) -> str:
    """Format the median of the known losses as perplexity, if most runs have one."""
    known = [loss for loss in losses if loss is not None]
    return f"{math.exp(statistics.median(known)):.2f}" if 2 * len(known) > len(losses) else "-"
